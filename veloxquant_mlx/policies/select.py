"""Which rows stay: the top scores, with protected rows first and ties settled by age."""

from __future__ import annotations

import mlx.core as mx


def top(score: mx.array, positions: mx.array, budget: int) -> tuple[mx.array, None]:
    """Indices ``(B, H, budget)``, oldest first, of the highest ``score`` ``(B, H, n)``; ties go to older rows.

    ``positions`` ``(B | 1, H | 1, n)`` say how old rows are. The second value says that no index is padding.
    """
    n = score.shape[-1]
    best = mx.argsort(_ordered(score, positions), axis=-1)[..., n - budget :]
    ages = mx.take_along_axis(mx.broadcast_to(positions, score.shape), best, axis=-1)
    return mx.take_along_axis(best, mx.argsort(ages, axis=-1), axis=-1), None


def lowest(score: mx.array, positions: mx.array) -> mx.array:
    """Index ``(B, H, 1)`` of the lowest ``score`` ``(B, H, n)``; ties go to older rows.

    Without a sort: this runs for every decoded token.
    """
    ties = score == score.min(axis=-1, keepdims=True)
    return mx.argmin(mx.where(ties, positions, 2**31 - 1), axis=-1, keepdims=True)


def oldest(positions: mx.array, sinks: int) -> mx.array:
    """Index ``(B | 1, H | 1, 1)`` of the oldest row that is no sink (and no hole)."""
    return mx.argmin(mx.where(positions < sinks, 2**31 - 1, positions), axis=-1, keepdims=True)


def protect(
    score: mx.array, positions: mx.array, sinks: int, recent: int, offset: int, hole: float = -mx.inf
) -> mx.array:
    """``score`` ``(B, H, n)`` with infinity at positions below ``sinks`` and at the newest ``recent`` of ``offset``.

    Holes (position -1) get ``hole``: minus infinity where the best rows are looked for, plus infinity where the worst.
    """
    score = mx.where((positions < sinks) | (positions >= offset - recent), mx.inf, score)
    return mx.where(positions < 0, hole, score)


def _ordered(score: mx.array, positions: mx.array) -> mx.array:
    """One uint64 per row that orders by (score, age): distinct keys select the same rows on every back end."""
    bits = score.astype(mx.float32).view(mx.uint32)
    ordered = mx.where(bits >> 31, ~bits, bits | 0x80000000).astype(mx.uint64)
    return (ordered << 32) | (2**31 - 1 - mx.maximum(positions, 0)).astype(mx.uint64)
