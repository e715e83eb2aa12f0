"""Masks. The model builds one mask for all layers; each layer picks the columns of the rows that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ..core.exceptions import CacheInputError

if TYPE_CHECKING:
    from ..cache.store import Store

Mask = mx.array | str | None


def for_rows(mask: Mask, offset: int, rows: int, positions: mx.array | None, query_heads: int) -> Mask:
    """``mask`` over the ``rows`` stored rows.

    An array mask has one column per logical position (``offset`` of them), whatever the layer holds; a mask that
    already has one column per stored row is taken as it is. ``positions`` ``(B | 1, H | 1, rows)`` says which
    position each stored row has, None that none was dropped. None and ``"causal"`` need no change: rows that were
    held before are all older than the new ones, and those sit last.
    """
    if not isinstance(mask, mx.array) or mask.shape[-1] == rows:
        return mask
    if mask.shape[-1] != offset:
        raise CacheInputError(
            f"mask has {mask.shape[-1]} columns; valid: {offset} (one per token so far) or {rows} (one per stored "
            "row). Build the mask with this cache's make_mask."
        )
    assert positions is not None
    if positions.shape[0] == positions.shape[1] == 1:
        return mx.take(mask, mx.maximum(positions[0, 0], 0), axis=-1)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    shape = (max(mask.shape[0], positions.shape[0]), query_heads, mask.shape[2])
    # Holes take any column: they are shut afterwards.
    index = mx.repeat(mx.maximum(positions, 0), query_heads // positions.shape[1], axis=1)[:, :, None]
    wide = mx.broadcast_to(mask, (*shape, offset))
    return mx.take_along_axis(wide, mx.broadcast_to(index, (*shape, rows)), axis=-1)


def live(store: Store) -> mx.array | None:
    """Boolean ``(B | 1, H | 1, 1, n)``, False at holes among the stored rows; None where there are none."""
    return None if not store.holes else (store.positions_or_range() >= 0)[:, :, None]


def without_holes(mask: Mask, store: Store, length: int, query_heads: int) -> Mask:
    """``mask`` of ``length`` query rows over the stored rows (``for_rows``), the holes among them shut."""
    seen = live(store)
    if seen is None:
        return mask
    if seen.shape[1] > 1:
        seen = mx.repeat(seen, query_heads // seen.shape[1], axis=1)
    if mask is None:
        return seen
    if isinstance(mask, str):
        past = store.n - length
        return seen & (mx.arange(past, past + length)[:, None] >= mx.arange(store.n)[None])
    return seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, mx.finfo(mask.dtype).min)


def only(mask: Mask, index: mx.array, n: int, query_heads: int) -> Mask:
    """``mask`` of one query row over ``n`` stored rows, all but ``index`` ``(B, H, k)`` shut."""
    chosen = mx.put_along_axis(mx.zeros((*index.shape[:2], n), mx.bool_), index, mx.array(True), axis=-1)
    chosen = mx.repeat(chosen, query_heads // index.shape[1], axis=1)[:, :, None]
    if not isinstance(mask, mx.array):
        return chosen
    return chosen & mask if mask.dtype == mx.bool_ else mx.where(chosen, mask, mx.finfo(mask.dtype).min)


def apply(scores: mx.array, mask: Mask, past: int, row: int = 0, column: int = 0) -> mx.array:
    """Scores ``(B, H, R, L, n)`` with masked entries at the dtype's minimum (finite: no row ends up as NaN).

    The scores at hand are those of query rows ``row`` on and stored rows ``column`` on; ``past`` stored rows are
    older than query row 0.
    """
    if mask is None:
        return scores
    _, h, r, length, n = scores.shape
    low = mx.finfo(scores.dtype).min
    if isinstance(mask, str):
        first = past + row
        if column + n <= first + 1:
            return scores
        allowed = mx.arange(first, first + length)[:, None] >= mx.arange(column, column + n)[None]
        return mx.where(allowed, scores, low)
    rows = slice(row, row + length) if mask.shape[-2] > 1 else slice(None)
    mask = mask[..., rows, column : column + n]
    if mask.ndim > 2:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        heads = mask.shape[1]
        mask = mask[:, :, None] if heads in (1, h) else mask.reshape(mask.shape[0], h, r, *mask.shape[2:])
    return mx.where(mask, scores, low) if mask.dtype == mx.bool_ else scores + mask.astype(scores.dtype)
