"""Kv heads apart: scores a few heads at a time, and heads of a layer that compete for one budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from . import select

if TYPE_CHECKING:
    from ..cache.store import Store


# Bytes that a float32 copy of the rows at hand may take.
SCRATCH = 64 << 20


def apart(score: Callable[..., mx.array], *rows: mx.array) -> mx.array:
    """``score(*rows)`` ``(B, H, n)`` of ``rows`` ``(B, H, n, D)``, for as many heads at a time as ``SCRATCH`` allows.

    One tile after another: side by side they would be the scratch that tiles avoid.
    """
    b, h, n, d = rows[0].shape
    step = max(1, SCRATCH // (4 * b * n * d))
    if step >= h:
        return score(*rows)
    parts: list[mx.array] = []
    for head in range(0, h, step):
        some = mx.depends([x[:, head : head + step] for x in rows], parts[-1:])
        parts.append(score(*some))
    return mx.concatenate(parts, axis=1)


@dataclass(frozen=True)
class Compete:
    """Keeps the best ``H * budget`` rows of a layer, each head's own best ``safe`` among them.

    Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation", arXiv:2407.11550.
    Heads are left with different numbers of rows: the longest sets the width, and the call waits for the device to
    learn it. Only for the end of a prompt.
    """

    safe: int

    @classmethod
    def sharing(cls, budget: int, share: float) -> Compete:
        """Every head is sure of ``share`` of ``budget``, at least of one row; of none with a share of 0."""
        return cls(max(1, int(share * budget)) if share > 0 else 0)

    def __call__(self, store: Store, score: mx.array, budget: int) -> tuple[mx.array, mx.array]:
        return self.of(score, budget)

    def of(self, score: mx.array, budget: int) -> tuple[mx.array, mx.array]:
        """Ascending indices ``(B, H, m)`` into ``score`` ``(B, H, n)`` and which of them are no padding.

        Ties go to lower heads, then to lower rows.
        """
        b, h, n = score.shape
        rows = mx.arange(h * n, dtype=mx.int32)[None, None]
        if self.safe:
            own, _ = select.top(score, rows[..., :n], min(self.safe, n))
            score = mx.put_along_axis(score, own, mx.array(mx.inf), axis=-1)
        best, _ = select.top(score.reshape(b, 1, h * n), rows, h * budget)
        chosen = mx.put_along_axis(mx.zeros((b, 1, h * n), mx.bool_), best, mx.array(True), axis=-1).reshape(b, h, n)
        width = int(np.array(chosen.sum(axis=-1)).max())
        order = mx.sort(mx.where(chosen, rows[..., :n], n), axis=-1)[..., :width]
        return mx.where(order < n, order, 0), order < n
