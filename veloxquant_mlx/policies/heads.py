"""Selection where the kv heads of a layer compete for one budget (Feng et al., "Ada-KV", arXiv:2407.11550)."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from . import select


class Ragged(NamedTuple):
    """Rows to keep per head: ``index`` ``(B, H, m)`` int32 ascending, ``valid`` ``(B, H, m)``; the rest is padding."""

    index: mx.array
    valid: mx.array


def compete(score: mx.array, budget: int, safe: int) -> Ragged:
    """The best ``H * budget`` rows of a layer by ``score`` ``(B, H, n)``, each head's own best ``safe`` among them.

    Ties go to lower heads, then to older rows. Waits for the device: the largest head sets the width. Only for the end
    of a prompt.
    """
    b, h, n = score.shape
    if safe:
        own = select.top(score, min(safe, n))
        score = mx.put_along_axis(score, own, mx.array(mx.inf), axis=-1)
    best = select.top(score.reshape(b, 1, h * n), h * budget)
    chosen = mx.put_along_axis(mx.zeros((b, 1, h * n), mx.bool_), best, mx.array(True), axis=-1).reshape(b, h, n)
    width = int(chosen.sum(axis=-1).max().item())
    order = mx.sort(mx.where(chosen, mx.arange(n, dtype=mx.int32), n), axis=-1)[..., :width]
    return Ragged(mx.where(order < n, order, 0), order < n)


def safe_rows(budget: int, share: float) -> int:
    """Rows that every head is sure of: ``share`` of ``budget``, at least one; none with a share of 0."""
    return max(1, int(share * budget)) if share > 0 else 0
