"""What a cache refuses: tensors that do not fit, and rows that are not finite."""

from __future__ import annotations

import mlx.core as mx

from ..core.exceptions import CacheInputError, CacheStateError

Geometry = tuple[int, int, int, int]  # B, H, Dk, Dv


def check_rows(keys: mx.array, values: mx.array, held: Geometry | None) -> None:
    """Raise CacheInputError unless the rows have the right form and fit what a cache holds (None: nothing yet)."""
    if keys.ndim != 4 or values.ndim != 4:
        raise CacheInputError(f"keys and values must have 4 axes (B, H, S, D); got {keys.shape} and {values.shape}")
    if 0 in keys.shape or 0 in values.shape:
        raise CacheInputError(f"keys {keys.shape} and values {values.shape}: no axis of (B, H, S, D) may be empty")
    if keys.shape[:3] != values.shape[:3]:
        raise CacheInputError(f"keys {keys.shape} and values {values.shape} must agree in (B, H, S)")
    if not (mx.issubdtype(keys.dtype, mx.floating) and mx.issubdtype(values.dtype, mx.floating)):
        raise CacheInputError(f"keys are {keys.dtype} and values {values.dtype}; valid: a float dtype")
    got = (*keys.shape[:2], keys.shape[3], values.shape[3])
    if held is not None and got != held:
        raise CacheInputError(f"this cache holds (B, H, Dk, Dv) = {held}; got {got}. Start a new cache for them.")


class FiniteWatch:
    """Whether the last chunk was finite: noted when it comes, looked at with the next call, so that nothing waits.

    mlx_lm evaluates the note with the cache's state between prompt chunks. A single decoded row needs none: it is in
    its own attention at once, and the output shows it.
    """

    def __init__(self) -> None:
        self.pending: tuple[int, mx.array] | None = None  # first token of the chunk, whether it is finite

    def note(self, keys: mx.array, values: mx.array, start: int) -> None:
        """Remember the chunk whose first token is ``start``."""
        if keys.shape[2] > 1:
            self.pending = (start, mx.all(mx.isfinite(keys)) & mx.all(mx.isfinite(values)))

    def check(self) -> None:
        """Raise CacheStateError, now and ever after, where the chunk was not finite."""
        if self.pending is None:
            return
        start, finite = self.pending
        if not finite.item():
            raise CacheStateError(
                f"keys or values from token {start} on hold NaN or infinity, which spoils what is held. "
                "Use a new cache; a model that overflows in float16 needs bfloat16 or float32."
            )
        self.pending = None
