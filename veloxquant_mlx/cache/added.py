"""Numbers added to rows that are held as codes: codes cannot be written to, so the sum is made where rows are read."""

from __future__ import annotations

import mlx.core as mx


class Added:
    """Float32 numbers ``rows`` ``(B, H, m, D)`` on top of the stored rows ``at`` ``(B | 1, H | 1, m)``; empty at first.

    An index may come twice where its numbers are zeros.
    """

    def __init__(self) -> None:
        self.at: mx.array | None = None
        self.rows: mx.array | None = None

    def clear(self) -> None:
        """Hold nothing."""
        self.at = self.rows = None

    def put(self, index: mx.array, delta: mx.array) -> None:
        """Add ``delta`` to rows ``index``. What was added before to other rows than these is forgotten."""
        if self.at is not None and self.rows is not None:
            same = (self.at[..., None] == index[..., None, :]).astype(mx.float32)
            delta = delta + same.swapaxes(-1, -2) @ self.rows
        self.at, self.rows = index, delta

    def move(self, index: mx.array, n: int) -> None:
        """Of ``n`` rows those of ``index`` ``(B | 1, H | 1, k)`` are kept, in that order."""
        if self.at is None or self.rows is None:
            return
        lead = mx.broadcast_shapes(self.at.shape[:2], index.shape[:2])
        index = mx.broadcast_to(index, (*lead, index.shape[2]))
        places = mx.broadcast_to(mx.arange(index.shape[2], dtype=mx.int32), index.shape)
        places = mx.put_along_axis(mx.full((*lead, n), -1, mx.int32), index, places, axis=-1)
        at = mx.take_along_axis(places, mx.broadcast_to(self.at, (*lead, self.at.shape[2])), axis=-1)
        self.at, self.rows = mx.maximum(at, 0), mx.where(at[..., None] < 0, 0.0, self.rows)

    def to_rows(self, x: mx.array, start: int) -> mx.array:
        """Decoded rows ``x`` ``(B, H, k, D)``, the stored ones from ``start`` on, with what belongs to them."""
        if self.at is None or self.rows is None:
            return x
        return (x.astype(mx.float32) + self._hits(start, x.shape[2]).swapaxes(-1, -2) @ self.rows).astype(x.dtype)

    def to_scores(self, scores: mx.array, q: mx.array) -> mx.array:
        """``scores`` ``(B, H, R, n)`` of ``q`` ``(B, H, R, D)`` over all stored rows."""
        if self.at is None or self.rows is None:
            return scores
        more = q.astype(mx.float32) @ self.rows.swapaxes(-1, -2)
        return scores + (more @ self._hits(0, scores.shape[-1])).astype(scores.dtype)

    def to_mix(self, out: mx.array, p: mx.array) -> mx.array:
        """Weighted sums ``out`` ``(B, H, R, D)`` of all stored rows under ``p`` ``(B, H, R, n)``."""
        if self.at is None or self.rows is None:
            return out
        weights = mx.take_along_axis(p, mx.broadcast_to(self.at[:, :, None], (*p.shape[:3], self.at.shape[2])), axis=-1)
        return out + (weights.astype(mx.float32) @ self.rows).astype(out.dtype)

    def _hits(self, start: int, n: int) -> mx.array:
        """``(B | 1, H | 1, m, n)``, 1 where an index is that of a stored row from ``start`` on."""
        assert self.at is not None
        return (self.at[..., None] == mx.arange(start, start + n)).astype(mx.float32)
