"""RocketKV's second stage: every decoded token attends to a few of the rows held, found by a cheap estimate.

Behnam et al., "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression",
arXiv:2502.14051. Written from the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from . import select

if TYPE_CHECKING:
    from ..cache.store import Store

# Page summaries grow by this many pages, so that a new page is one small write.
ROOM = 16
TINY = 1e-30


class Plan(NamedTuple):
    """What follows from a prompt's length: rows kept, rows per page, channels of the estimate, rows read per token."""

    rows: int
    page: int
    channels: int
    tokens: int


@dataclass(frozen=True)
class HybridAttention:
    """Rows that a query reads: those whose pages, or they themselves (pages of one row), promise most attention.

    The same object is the budget of the first stage. ``ratio`` is how many times fewer numbers than a full cache holds
    a decoded token reads; ``dim`` is the size of keys; ``least`` rows are kept and read at any rate. ``page`` and
    ``channels`` replace what follows from the ratio. A page is known by the largest and the smallest number of each
    channel, ``store.aux["pages"]`` ``(B, H, 2 D, pages)``, of the keys as they came. All query heads of a kv head share
    their rows; per channel the sign of their sum says which of the two numbers counts. Learned sink logits have no part
    in the estimate.
    """

    ratio: float
    dim: int
    least: int
    page: int | None = None
    channels: int | None = None

    def plan(self, length: int) -> Plan:
        """For a prompt of ``length`` tokens. It is kept until the next prompt ends, whatever is decoded."""
        share = min(0.2 + 0.06 * math.log2(self.ratio), 0.8)
        rows, budget = int(length / self.ratio**share), length / self.ratio
        left = max(1.0, rows / budget)  # what the second stage has to save
        page = math.ceil(math.sqrt(left))
        page = self.page or (page if page <= left else 1)
        channels = self.channels or min(max(int(self.dim * page / left), 1), self.dim)
        return Plan(max(rows, self.least), page, channels, max(int(budget // 2), self.least))

    def __call__(self, length: int) -> int:
        """Rows per kv head that stay of a prompt of ``length`` tokens."""
        return self.plan(length).rows

    def shares(self, length: int) -> tuple[float, float]:
        """Of a full cache's keys and values: the share that is held, and that a decoded token reads."""
        rows, page, channels, tokens = self.plan(length)
        rows, tokens = min(rows, length), min(tokens, length)
        estimate = rows * self.dim if page == 1 else rows / page * channels
        whole = 2 * length * self.dim
        return rows / length * (1 + (page > 1) / page), (estimate + 2 * tokens * self.dim) / whole

    def prepare(self, store: Store, offset: int) -> None:
        store.numbers |= {"prompt": offset, "summed": store.n}
        page = self.plan(offset).page
        if page == 1:
            store.aux.pop("pages", None)
        else:
            store.aux["pages"] = summaries(store.keys.dense(), page)

    def select(self, store: Store, q: mx.array, scale: float) -> mx.array | None:
        # More than one row since then: the tokens are those of another prompt, which attend to everything.
        if "prompt" not in store.numbers or store.n - store.numbers["summed"] > 1:
            return None
        plan, n = self.plan(store.numbers["prompt"]), store.n
        if store.numbers["summed"] < n:
            if plan.page > 1:
                store.aux["pages"] = with_row(store.aux["pages"], store.keys.dense(n - 1, n), n - 1, plan.page)
            store.numbers["summed"] = n
        if n <= plan.tokens:
            return None
        logits, share = self.logits(store, q, plan)
        # As if the channels left out had the same share of the logit as they have of the query.
        weights = mx.softmax(logits * (scale / mx.sqrt(mx.maximum(share, TINY))), axis=-1).mean(axis=2)
        return select.top(weights, mx.arange(n, dtype=mx.int32)[None, None], plan.tokens)[0]

    def logits(self, store: Store, q: mx.array, plan: Plan) -> tuple[mx.array, mx.array]:
        """Estimates ``(B, H, G, n)`` of ``q @ keys`` per query head, and the share of the query in their channels."""
        b, h, d = q.shape[0], store.keys.heads, q.shape[3]
        q = q.astype(mx.float32).reshape(b, h, q.shape[1] // h, d)
        size = mx.abs(q)
        best = mx.argsort(-size.sum(axis=2), axis=-1)[..., : plan.channels]
        index = mx.broadcast_to(best[:, :, None], (*q.shape[:3], plan.channels))
        some = mx.take_along_axis(q, index, axis=-1)
        if plan.page == 1:
            e = store.keys.scores(mx.put_along_axis(mx.zeros_like(q), index, some, axis=-1))
        else:
            pages = store.aux["pages"]
            highest = mx.take_along_axis(q.sum(axis=2), best, axis=-1) > 0
            place = mx.where(highest, best, best + d)[..., None]
            bound = mx.take_along_axis(pages, mx.broadcast_to(place, (*place.shape[:3], pages.shape[3])), axis=2)
            e = mx.repeat(some @ bound.astype(mx.float32), plan.page, axis=-1)[..., : store.n]
        return e, mx.abs(some).sum(axis=-1, keepdims=True) / mx.maximum(size.sum(axis=-1, keepdims=True), TINY)


def summaries(keys: mx.array, page: int) -> mx.array:
    """Maxima, then minima, ``(B, H, 2 D, pages)`` of pages of ``keys`` ``(B, H, n, D)``, with room to grow."""
    b, h, n, d = keys.shape
    pages = -(-n // page)

    def over(fill: float) -> mx.array:
        padded = mx.pad(keys, [(0, 0), (0, 0), (0, pages * page - n), (0, 0)], constant_values=fill)
        rows = padded.reshape(b, h, pages, page, d)
        return rows.max(axis=3) if fill < 0 else rows.min(axis=3)

    both = mx.concatenate([over(-mx.inf), over(mx.inf)], axis=-1).swapaxes(-1, -2)
    return mx.pad(both, [(0, 0)] * 3 + [(0, -pages % ROOM)])


def with_row(pages: mx.array, row: mx.array, index: int, page: int) -> mx.array:
    """``pages`` with key ``row`` ``(B, H, 1, D)`` as stored row ``index``, the one after those seen."""
    d, at = row.shape[3], index // page
    both = mx.concatenate([row, row], axis=-1).swapaxes(-1, -2)
    if index % page:
        old = pages[..., at : at + 1]
        both = mx.concatenate([mx.maximum(old[:, :, :d], both[:, :, :d]), mx.minimum(old[:, :, d:], both[:, :, d:])], 2)
    elif at == pages.shape[3]:
        pages = mx.pad(pages, [(0, 0)] * 3 + [(0, ROOM)])
    pages[..., at : at + 1] = both
    return pages
