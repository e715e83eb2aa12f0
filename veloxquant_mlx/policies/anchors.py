"""Which rows of a prompt are anchors, which anchor stands for every other row, and whose residual is worth its bytes.

The choices of AnchorKV (Khalaf et al., arXiv 2608.02901), from the last queries of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from ..codecs.anchors import Plan, factors, owners
from ..codecs.base import take_rows
from . import ring, select
from .guide import Guide, PerRow, due
from .observed import seen, weights
from .scores import OF_GUIDE, pool

if TYPE_CHECKING:
    from ..cache.store import Store
    from ..models.rope import Rotation
    from .scores import Step

KERNEL = 7  # of the pooling of scores, as in SnapKV; the paper names none
QUERIES, LOGITS = OF_GUIDE + "queries", OF_GUIDE + "logits"


@dataclass(frozen=True)
class AnchorChoice(Guide):
    """Answers for the rows of the first prompt, when it ends, what ``codecs.anchors`` wants to know of each.

    Of the anchors beyond the newest rows, ``rho`` have the largest scores (attention of the last queries, mean over
    them and over the query heads of the kv head, pooled along the rows); the others lie evenly among the rows left.
    Residuals go to the rows whose absence would move the outputs of these queries most, over all heads of the layer.

    In the store until then: ``aux["guide.queries"]`` ``(B, Hq, m, D)``, scaled, and ``aux["guide.logits"]``, learned
    sinks.
    """

    survives_drops = True

    plan: Plan
    rho: float
    rope: Rotation | None = None

    def observe(self, store: Store, step: Step) -> None:
        length = step.queries.shape[2]
        if step.offset == length or not store.sealed:  # a trim into the prompt brings its rows back: they end anew
            store.numbers.pop("anchored", None)
        if "anchored" in store.numbers:
            return
        q = (step.queries.astype(mx.float32) * step.scale).astype(step.queries.dtype)
        ring.remember(store, q, self.plan.window, QUERIES)
        if step.sinks is not None:
            store.aux[LOGITS] = step.sinks

    def rows(self, store: Store, offset: int, ends: bool) -> PerRow:
        start, stop = due(store.keys, ends)
        told = self._told(store, offset, start, stop) if stop > start else None
        if ends:
            store.numbers["anchored"] = 1
            ring.forget(store, QUERIES, LOGITS)

        def answer(first: int, last: int) -> mx.array:
            assert told is not None, "no rows were due"
            return told[:, :, first - start : last - start]

        return answer

    def _told(self, store: Store, offset: int, start: int, stop: int) -> mx.array:
        b, h, n = store.keys.batch, store.keys.heads, stop - start
        positions = mx.broadcast_to(store.places.where(start, stop), (b, h, n))
        own = store.positions is not None or start > 0
        alpha, queries, out = self._attention(store, offset)
        alpha, live = alpha[..., start:stop], positions >= 0
        anchors = self._anchors(mx.where(live, pool(alpha.mean(axis=(2, 3)), KERNEL, "mean"), -1.0))
        inside = mx.put_along_axis(mx.zeros((b, h, n), mx.int32), anchors, mx.array(1, mx.int32), axis=-1)
        keys, values = (rows.dense(start, stop, mx.float32) for rows in (store.keys, store.values))
        plain = keys if self.rope is None else self.rope.turn(keys, -positions)
        (key_owner, key_left), (value_owner, value_left) = (_left(x, anchors) for x in (plain, values))
        key_left = key_left if self.rope is None else self.rope.turn(key_left, positions)
        worth = utilities(alpha, queries, out, key_left, values, value_left)
        counts = self.plan.slots(n, h, own)
        held = [
            chosen(mx.where(inside > 0, -1.0, mx.where(live, u, 0.0)), m) for u, m in zip(worth, counts, strict=True)
        ]
        return mx.stack([inside, key_owner, value_owner, *held, *([positions] if own else [])], axis=-1)

    def _attention(self, store: Store, offset: int) -> tuple[mx.array, mx.array, mx.array]:
        """Weights ``(B, H, G, m, n)`` of the m queries held over all rows, the queries, and exact outputs."""
        q, h = store.aux[QUERIES].astype(mx.float32), store.keys.heads
        b, hq, m, d = q.shape
        q = q.reshape(b, h, hq // h * m, d)
        z = store.keys.scores(q).reshape(b, h, hq // h, m, store.n)
        at = mx.arange(offset - m, offset, dtype=mx.int32)[:, None]
        alpha = weights(z, seen(store.positions_or_range()[:, :, None, None], at), store.aux.get(LOGITS))
        out = store.values.mix(alpha.reshape(b, h, -1, store.n))
        return alpha, q, out

    def _anchors(self, score: mx.array) -> mx.array:
        """Rows ``(B, H, k)``, ascending, from scores ``(B, H, n)``."""
        b, h, n = score.shape
        k, newest = self.plan.anchors(n), min(self.plan.window, n)
        old, more = n - newest, k - newest
        tail = mx.broadcast_to(mx.arange(old, n, dtype=mx.int32), (b, h, newest))
        if not more:
            return tail
        best, at = round(self.rho * more), mx.arange(old, dtype=mx.int32)
        top = select.top(score[..., :old], at[None, None], best)[0].astype(mx.int32)
        taken = mx.put_along_axis(mx.zeros((b, h, old), mx.int32), top, mx.array(old, mx.int32), axis=-1)
        rest = mx.argsort(taken + at, axis=-1)[..., : old - best].astype(mx.int32)
        even = (mx.arange(more - best, dtype=mx.int32) * 2 + 1) * (old - best) // max(2 * (more - best), 1)
        return mx.concatenate([mx.sort(mx.concatenate([top, rest[..., even]], axis=-1), axis=-1), tail], axis=-1)


def _left(x: mx.array, anchors: mx.array) -> tuple[mx.array, mx.array]:
    """The anchor of every row of ``x`` and what is left of the row without it."""
    heads = take_rows(x, anchors)
    owner = owners(x, heads)
    own = take_rows(heads, owner)
    return owner, x - factors(x, own).astype(mx.float32)[..., None] * own


def utilities(
    alpha: mx.array, queries: mx.array, out: mx.array, key_left: mx.array, values: mx.array, value_left: mx.array
) -> tuple[mx.array, mx.array]:
    """What the residuals of keys and of values are worth to the queries, ``(B, H, n)`` each: equation 6 of the paper.

    ``alpha`` ``(B, H, G, m, n)`` exact weights of scaled ``queries`` ``(B, H, G * m, D)`` with exact outputs ``out``
    ``(B, H, G * m, Dv)``; ``key_left`` are the residuals of keys at their positions.
    """
    b, h, g, m, n = alpha.shape
    paid = mx.square(alpha).reshape(b, h, g * m, n)
    moved = mx.square(queries @ key_left.swapaxes(-1, -2))
    far = mx.square(values).sum(-1)[:, :, None] - 2 * out @ values.swapaxes(-1, -2) + mx.square(out).sum(-1)[..., None]
    return (paid * moved * mx.maximum(far, 0)).mean(axis=2), paid.mean(axis=2) * mx.square(value_left).sum(axis=-1)


def chosen(worth: mx.array, count: int) -> mx.array:
    """1 at the ``count`` largest of each sequence, over all heads; of equal ones those of the first head and row."""
    b, h, n = worth.shape
    index = select.top(worth.reshape(b, 1, h * n), mx.arange(h * n, dtype=mx.int32)[None, None], count)[0]
    flags = mx.put_along_axis(mx.zeros((b, 1, h * n), mx.int32), index, mx.array(1, mx.int32), axis=-1)
    return flags.reshape(b, h, n)
