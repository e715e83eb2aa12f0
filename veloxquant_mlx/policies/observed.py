"""Scores from the model's own attention weights: summed over all queries, of the last one, of a few recent ones.

Fused attention does not hand its weights out, so they are computed again from the queries and the stored keys, a few
queries at a time. Row order does not matter here: positions say what a query sees, and rows of position -1 are holes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from ..attention import reference
from .scores import Score, newest

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step

# Bytes that float32 weights of one tile of queries may take.
SCRATCH = 64 << 20

Weigh = Callable[[mx.array, int], mx.array]


def over_queries(
    store: Store,
    queries: mx.array,
    scale: float,
    weigh: Weigh,
    fold: Callable[[mx.array, mx.array], mx.array] = mx.add,
    arrays: int = 1,
    decoded: bool = False,
) -> mx.array:
    """Fold ``weigh(z, start)`` over tiles of the ``queries`` ``(B, Hq, L, D)``.

    ``z`` ``(B, H, G, R, n)`` are the float32 scaled logits of queries ``start`` to ``start + R``, for the G query heads
    of every kv head. ``arrays``: how many arrays of z's size ``weigh`` needs. ``decoded``: from decoded float32 keys.
    """
    b, hq, length, d = queries.shape
    h, n = store.keys.heads, store.n
    rows = max(1, SCRATCH // (4 * arrays * b * hq * n))
    dense = store.keys.dense(dtype=mx.float32).swapaxes(-1, -2) if decoded else None
    out: mx.array | None = None
    for start in range(0, length, rows):
        q = queries[:, :, start : start + rows]
        if out is not None:  # one tile after another: side by side they would be the scratch that tiles avoid
            q = mx.depends([q], [out])[0]
        r = q.shape[2]
        q = (q.astype(mx.float32) * scale).reshape(b, h, hq // h * r, d)
        z = (store.keys.scores(q) if dense is None else q @ dense).reshape(b, h, hq // h, r, n)
        part = weigh(z, start)
        out = part if out is None else fold(out, part)
    assert out is not None
    return out


def weights(z: mx.array, allowed: mx.array, sinks: mx.array | None) -> mx.array:
    """Softmax of ``z`` ``(B, H, G, R, n)`` over the ``allowed`` rows, 0 elsewhere; learned sinks take their share."""
    return reference.softmax(mx.where(allowed, z, mx.finfo(z.dtype).min), sinks)


@dataclass(frozen=True)
class SummedAttention(Score):
    """Attention that a row got from every query since it came, mean over the query heads of its kv head.

    With ``decay`` below 1 each query makes those before it count by that factor less: per query, not per call, so that
    sums do not depend on how a prompt was fed. They live in ``store.row_aux["acc"]`` ``(B, H, n)``.
    """

    decay: float = 1.0

    def observe(self, store: Store, step: Step) -> None:
        positions = store.positions_or_range()[:, :, None, None]  # against (B, H, G, R, n)
        length = step.queries.shape[2]

        def weigh(z: mx.array, start: int) -> mx.array:
            at = mx.arange(start, start + z.shape[3], dtype=mx.int32)[:, None] + (step.offset - length)
            a = self.weights(store, z, positions, at, step.sinks)
            if self.decay < 1:
                a = a * mx.power(self.decay, step.offset - 1 - at)
            return a.sum(axis=(2, 3)) / z.shape[2]

        sums = over_queries(store, step.queries, step.scale, weigh, arrays=self.arrays)
        acc = store.row_aux.get("acc")
        store.row_aux["acc"] = sums if acc is None else acc * self.decay**length + sums

    @property
    def arrays(self) -> int:
        """Arrays of the logits' size that ``weights`` needs at a time."""
        return 1

    def weights(self, store: Store, z: mx.array, positions: mx.array, at: mx.array, sinks: mx.array | None) -> mx.array:
        """What queries at positions ``at`` ``(R, 1)`` add to rows at ``positions`` ``(B | 1, H | 1, 1, 1, n)``."""
        return weights(z, seen(positions, at), sinks)

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        return store.row_aux["acc"]

    def forget(self, store: Store) -> None:
        """Nothing: the rows that stay keep their sums."""


def seen(positions: mx.array, at: mx.array) -> mx.array:
    """Which rows queries see: those that are no holes and not newer."""
    return (positions >= 0) & (positions <= at)


@dataclass(frozen=True)
class RecentQueries(Score):
    """A score that follows from what is held now and the newest ``window`` queries, kept in ``store.aux``."""

    window: int = 1

    def observe(self, store: Store, step: Step) -> None:
        newest(store, "queries", step.queries, self.window)

    def forget(self, store: Store) -> None:
        """Nothing: the next step's choice needs the same queries."""


@dataclass(frozen=True)
class LastQuery(RecentQueries):
    """Attention that the newest query pays to each row, mean over all heads of the layer: ``(B, 1, n)``.

    ``decoded`` scores decoded float32 keys instead of what is stored: for comparison.
    """

    decoded: bool = False

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        live = store.positions_or_range()[:, :, None, None] >= 0

        def weigh(z: mx.array, start: int) -> mx.array:
            return weights(z, live, sinks).mean(axis=(1, 2))

        return over_queries(store, store.aux["queries"], scale, weigh, decoded=self.decoded)


@dataclass(frozen=True)
class RecentCorrelation(RecentQueries):
    """Share of each older row in the attention that the newest ``window`` queries pay to the older rows alone.

    Shares of one query are taken over the rows older than the window, then fused over the window (their sum or the
    largest), then averaged over the query heads of a kv head. Nothing is remembered of earlier choices. The window's
    own rows get no score: whoever selects protects them.
    """

    fusion: Literal["sum", "max"] = "sum"

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        positions = store.positions_or_range()
        first = positions.max(axis=-1, keepdims=True) - self.window + 1
        old = ((positions >= 0) & (positions < first))[:, :, None, None]
        fuse, fold = (mx.sum, mx.add) if self.fusion == "sum" else (mx.max, mx.maximum)

        def weigh(z: mx.array, start: int) -> mx.array:
            return fuse(weights(z, old, sinks), axis=3)

        return over_queries(store, store.aux["queries"], scale, weigh, fold).mean(axis=2)
