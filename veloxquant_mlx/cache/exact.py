"""Tokens whose rows stay exact beside the packed ones, wherever they stand: attention sinks that a method finds."""

from __future__ import annotations

import mlx.core as mx

from ..codecs.base import take_rows
from .places import Places

NOBODY = -2  # a place that no token has taken yet (-1 is the position of holes)


def first(flags: mx.array, axis: int) -> mx.array:
    """Where the first True of ``flags`` is along ``axis``, int32; 0 where there is none."""
    return mx.argmax(flags.astype(mx.uint8), axis=axis).astype(mx.int32)  # not every back end compares booleans


class Exact:
    """Copies ``rows`` ``(B, H, m, D)`` of the packed rows whose positions are protected; None until one is.

    A position is marked before its row is packed. The packed row stays where it is and is never read; what its codes
    hold is the nearest row of its block that is not protected, so that neighbours keep their range. All positions
    given here are ``(B | 1, H | 1, k)`` int32.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self.rows: mx.array | None = None

    def _hits(self, positions: mx.array) -> mx.array | None:
        """``(B | 1, H | 1, m, k)``: which mark each position is; None without marks."""
        marks = self._places.protected
        return None if marks is None else marks[..., None] == positions[:, :, None]

    def note(self, rows: mx.array, positions: mx.array) -> None:
        """Rows ``(B, H, k, D)`` are about to be packed: copy the protected ones."""
        hits = self._hits(positions)
        if hits is None:
            return
        found, which = hits.any(axis=-1)[..., None], first(hits, axis=-1)
        new = rows if rows.shape[2] == 1 else take_rows(rows, which)
        old = self.rows
        if old is None:
            old = mx.zeros((*rows.shape[:2], hits.shape[2], rows.shape[3]), rows.dtype)
        self.rows = mx.where(found, new, old)

    def shielded(self, rows: mx.array, positions: mx.array, block: int) -> mx.array:
        """Rows ``(B, H, k, D)``, ``k`` a multiple of ``block``: a protected one becomes the nearest other of its block.

        Of two equally near the older one; blocks of protected rows alone stay as they are.
        """
        hits = self._hits(positions)
        if hits is None:
            return rows
        *lead, k = hits.any(axis=-2).shape
        taken = hits.any(axis=-2).reshape(*lead, k // block, block)
        here, far = mx.arange(block, dtype=mx.int32), 2 * block
        older = mx.cummax(mx.where(taken, -far, here), axis=-1)
        newer = mx.cummin(mx.where(taken, 2 * far, here), axis=-1, reverse=True)
        nearest = mx.where(here - older <= newer - here, older, newer)
        nearest = mx.where(taken.all(axis=-1, keepdims=True), here, nearest)
        start = mx.arange(0, k, block, dtype=mx.int32)[:, None]
        return take_rows(rows, (nearest + start).reshape(*lead, k))

    def to_rows(self, x: mx.array, positions: mx.array) -> mx.array:
        """Decoded rows ``x`` ``(B, H, k, D)`` with the exact ones in their places."""
        hits = None if self.rows is None else self._hits(positions)
        if self.rows is None or hits is None:
            return x
        exact = take_rows(self.rows, first(hits, axis=-2))
        return mx.where(hits.any(axis=-2)[..., None], exact.astype(x.dtype), x)

    def to_scores(self, scores: mx.array, q: mx.array, positions: mx.array) -> mx.array:
        """``scores`` ``(B, H, R, k)`` of ``q`` ``(B, H, R, D)`` over packed rows, exact ones in their places."""
        hits = None if self.rows is None else self._hits(positions)
        if self.rows is None or hits is None:
            return scores
        own = q @ self.rows.astype(q.dtype).swapaxes(-1, -2) @ hits.astype(q.dtype)
        return mx.where(hits.any(axis=-2)[:, :, None], own.astype(scores.dtype), scores)

    def split(self, p: mx.array, positions: mx.array) -> tuple[mx.array, mx.array | None]:
        """Weights ``p`` ``(B, H, R, k)`` over packed rows without the exact ones, and the weighted sum of those.

        That is ``(B, H, R, D)``, None where there are none.
        """
        hits = None if self.rows is None else self._hits(positions)
        if self.rows is None or hits is None:
            return p, None
        own = p @ hits.astype(p.dtype).swapaxes(-1, -2) @ self.rows.astype(p.dtype)
        return mx.where(hits.any(axis=-2)[:, :, None], 0.0, p), own
