"""Codebooks that a configuration brings along."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ._method import refuse


def as_numpy(x: Any) -> np.ndarray:
    """An array of any kind as float32; numpy takes no bfloat16 of MLX."""
    return np.array(x.astype(mx.float32) if isinstance(x, mx.array) else x, np.float32)


def codebook(field: str, book: Any, heads: int | None, places: int) -> mx.array:
    """``book`` as float32 ``(H | 1, P | 1, K, d)``.

    It may be ``(K, d)``, one per head ``(H, K, d)``, one per place in the row ``(P, K, d)`` (where H = P: per head) or
    ``(H, P, K, d)``; anything else is refused in the name of ``field``.
    """
    x = mx.array(as_numpy(book))
    shape = tuple(x.shape)
    per_place = x.ndim == 3 and shape[0] == places and shape[0] != heads
    lead = {2: (1, 1), 3: (1, places) if per_place else (shape[0], 1), 4: shape[:2]}.get(x.ndim, (0, 0))
    if lead[0] not in (1, heads or lead[0]) or lead[1] not in (1, places) or not lead[0]:
        valid = f"(K, d), (H, K, d), (P, K, d) or (H, P, K, d) with H = {heads} heads and P = {places} places"
        refuse(f"{field} of shape", shape, valid, "Fit it on the model that it is used with.")
    return x.reshape(*lead, *shape[-2:])
