"""Which heads need more bits, and how a fixed sum of bits is shared among the heads of a layer.

The sign and the floor of Ada-KV (Feng et al., NeurIPS 2025, arXiv 2407.11550), which shares tokens; bits are ours.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .guide import Guide, PerRow, due, nothing

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step

# Times that the error of uniform levels between minimum and maximum shrinks with each bit (RateQuant's beta).
BETA = 5.0


def share_bits(importance: mx.array, choices: Sequence[int], budget: int) -> mx.array:
    """Bits ``(B, H, k)`` uint8 for ``importance`` ``(B, H, k)`` float32 >= 0, a sum over H of at most ``budget``.

    From the first of the rising ``choices`` on, the head that gains most per bit by its next choice takes it, where
    the gain is its share of the importance times the drop of ``BETA**-bits``; of equal ones the first. Optimal where
    all choices are equally far apart. A step that no longer fits is passed over. ``budget`` is reached where the
    choices can make it.
    """
    b, heads, k = importance.shape
    mean = importance.mean(axis=1, keepdims=True)
    weight = mx.where(mean > 0, importance / mx.where(mean > 0, mean, 1.0), 1.0)
    steps = [(high - low, (BETA**-low - BETA**-high) / (high - low)) for low, high in pairwise(choices)]
    left = budget - heads * choices[0]
    bits = mx.full((b, heads, k), choices[0], mx.int32)
    if not steps or left <= 0:
        return bits.astype(mx.uint8)
    # All steps of all heads, (B, steps * H, k): a head's first step comes before its second, which gains less.
    gain = mx.concatenate([weight * drop for _, drop in steps], axis=1)
    cost = mx.repeat(mx.array([size for size, _ in steps], dtype=mx.int32), heads)[None, :, None]
    n = gain.shape[1]
    first = mx.arange(n)[:, None] < mx.arange(n)[None]  # [i, j]: i goes before j where they gain the same
    before = (gain[:, :, None] > gain[:, None]) | ((gain[:, :, None] == gain[:, None]) & first[None, :, :, None])
    spent = (before * cost[:, :, None]).sum(axis=1) + cost
    taken = spent <= left
    smallest = min(size for size, _ in steps)
    if any(size != smallest for size, _ in steps):
        rest = left - (taken * cost).sum(axis=1, keepdims=True)
        ready = mx.concatenate([mx.ones((b, heads, k), mx.bool_), taken[:, :-heads]], axis=1)
        more = ~taken & ready & (cost == smallest)
        taken = taken | (more & ((before * more[:, :, None] * smallest).sum(axis=1) + smallest <= rest))
    return (bits + (taken * cost).reshape(b, -1, heads, k).sum(axis=1)).astype(mx.uint8)


def entropy(p: mx.array) -> mx.array:
    """Entropy of ``p`` ``(..., n)`` over its last axis, from 0 (one entry) to 1 (all equal)."""
    p = p / mx.maximum(p.sum(axis=-1, keepdims=True), 1e-30)
    return -(p * mx.log(mx.maximum(p, 1e-30))).sum(axis=-1) / mx.log(mx.array(float(max(p.shape[-1], 2))))


@dataclass(frozen=True)
class HeadBits(Guide):
    """Bits per head for every block of ``block`` rows, from what the block itself says of its heads.

    Every sequence has an allocation of its own. The first block that begins at or after another multiple of
    ``interval`` tokens gets a new one, any other that of the block before. Values get the bits of their block's keys.
    """

    choices: tuple[int, ...]
    budget: int
    block: int
    interval: int = 1

    @abstractmethod
    def importance(self, store: Store, start: int, stop: int) -> mx.array:
        """Of the heads in the blocks of rows ``start`` to ``stop``, float32 ``(B, H, blocks)``, at least 0."""

    def rows(self, store: Store, offset: int, ends: bool) -> PerRow:
        (start, stop), (low, high) = due(store.keys, ends), due(store.values, ends)
        if start == stop and low == high:
            return nothing
        first, packed = store.keys.spec.sinks, store.keys.packed
        assert packed is not None
        parts = [packed.view()["bits"]] if packed.n else []
        if start < stop:
            parts.append(share_bits(self.importance(store, start, stop), self.choices, self.budget))
        bits = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        sources = self._sources((start - first) // self.block, (stop - first) // self.block)
        bits = bits if sources is None else mx.take(bits, mx.array(sources), axis=-1)
        return lambda low, high: bits[..., (low - first) // self.block : (high - first) // self.block]

    def _sources(self, start: int, stop: int) -> list[int] | None:
        """For each of ``stop`` blocks the one whose bits it gets, where blocks ``start`` on are new; None: its own."""
        out = list(range(stop))
        for i in range(max(start, 1), stop):
            if i * self.block // self.interval == (i - 1) * self.block // self.interval:
                out[i] = out[i - 1]
        return None if out == list(range(stop)) else out


class KeySpread(HeadBits):
    """Importance by the variance of the keys' norms over the block: wide ranges suffer more from few bits."""

    needs_queries = False

    def observe(self, store: Store, step: Step) -> None:
        """Nothing: the keys alone decide."""

    def importance(self, store: Store, start: int, stop: int) -> mx.array:
        keys = store.keys.dense(start, stop).astype(mx.float32)
        norms = mx.linalg.norm(keys, axis=-1)
        return mx.var(norms.reshape(*norms.shape[:2], -1, self.block), axis=-1)


@dataclass(frozen=True)
class AttentionSpread(HeadBits):
    """Importance by the entropy of attention: a head that looks everywhere gets more than one that looks at a point.

    Over the keys of the block, mean over its last ``window`` queries and the query heads of a kv head, in units of the
    entropy of equal weights. Queries that are not at hand any more have no say; without any, all heads are equal.

    In the store: ``aux["guide.queries"]`` ``(B, Hq, m, D)``, the newest ones, scaled, whose number
    ``row_aux["guide.ring"]`` says (the store cuts it by every trim), and, between observing and sealing,
    ``aux["guide.importance"]``.
    """

    window: int = 32

    def observe(self, store: Store, step: Step) -> None:
        aux, marks, length = store.aux, store.row_aux, step.queries.shape[2]
        queries = (step.queries.astype(mx.float32) * step.scale).astype(step.queries.dtype)
        held = marks["guide.ring"].shape[-1] - length if "guide.ring" in marks else 0
        if held > 0:
            queries = mx.concatenate([aux["guide.queries"][:, :, :held], queries], axis=2)
        start, stop = due(store.keys, False)
        if start < stop:
            aux["guide.importance"] = self._entropies(store, queries, start, stop)
            store.numbers["guide.rows"] = store.n
        queries = queries[:, :, -self.window :] * 1  # a buffer of its own
        aux["guide.queries"], marks["guide.ring"] = queries, mx.zeros((1, 1, queries.shape[2]), mx.uint8)

    def importance(self, store: Store, start: int, stop: int) -> mx.array:
        blocks = (stop - start) // self.block
        found = store.aux.pop("guide.importance", None)
        if (
            found is None or found.shape[-1] != blocks or store.numbers.get("guide.rows") != store.n
        ):  # other rows than those that were observed
            return mx.zeros((store.keys.batch, store.keys.heads, blocks))
        return found

    def _entropies(self, store: Store, queries: mx.array, start: int, stop: int) -> mx.array:
        """Of the blocks of rows ``start`` to ``stop``; ``queries`` are those of the newest rows, scaled."""
        b, hq, m, d = queries.shape
        h, blocks, oldest = store.keys.heads, (stop - start) // self.block, store.n - m
        window = min(self.window, self.block)
        ends = np.arange(start, stop, self.block)[:, None] + self.block
        rows = ends - window + np.arange(window)  # (blocks, window)
        q = queries[:, :, mx.array(np.maximum(rows - oldest, 0).reshape(-1))].astype(mx.float32)
        q = q.reshape(b, h, hq // h, blocks, window, d).swapaxes(2, 3).reshape(b, h, blocks, hq // h * window, d)
        keys = store.keys.dense(start, stop).astype(mx.float32).reshape(b, h, blocks, self.block, d)
        z = (q @ keys.swapaxes(-1, -2)).reshape(b, h, blocks, hq // h, window, self.block)
        seen = mx.arange(self.block - window, self.block)[:, None] >= mx.arange(self.block)
        p = mx.softmax(mx.where(seen, z, mx.finfo(mx.float32).min), axis=-1)
        known = mx.array((rows >= oldest).astype(np.float32))[:, None, :, None]
        return entropy((p * known).sum(axis=(3, 4)))
