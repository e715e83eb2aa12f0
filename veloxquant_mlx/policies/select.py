"""Which rows stay: the top scores, with protected rows first and ties settled by age."""

from __future__ import annotations

import mlx.core as mx


def top(score: mx.array, budget: int) -> mx.array:
    """Ascending indices ``(B, H, budget)`` of the highest ``score`` ``(B, H, n)``; ties go to older rows."""
    n = score.shape[-1]
    # One key per row that orders by (score, age): distinct keys select the same rows on every back end.
    bits = score.astype(mx.float32).view(mx.uint32)
    ordered = mx.where(bits >> 31, ~bits, bits | 0x80000000).astype(mx.uint64)
    keys = (ordered << 32) | mx.arange(n - 1, -1, -1, dtype=mx.uint64)
    return mx.sort(mx.argsort(keys, axis=-1)[..., n - budget :], axis=-1)


def protect(score: mx.array, positions: mx.array | None, sinks: int, recent: int) -> mx.array:
    """``score`` ``(B, H, n)`` with infinity at positions below ``sinks`` and at the newest ``recent`` rows."""
    n = score.shape[-1]
    rows = mx.arange(n)
    keep = ((rows if positions is None else positions) < sinks) | (rows >= n - recent)
    return mx.where(keep, mx.inf, score)
