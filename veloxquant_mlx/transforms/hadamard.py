"""The Hadamard transform for any head size, without random signs."""

from __future__ import annotations

import mlx.core as mx

from .base import Transform
from .rotation import hadamard_is_safe


class BlockHadamard(Transform):
    """Orthonormal and its own inverse: of the whole row, or of blocks as large as a power of two that divides it."""

    def __init__(self, dim: int) -> None:
        self.block = dim if hadamard_is_safe(dim) else dim & -dim

    def forward(self, x: mx.array) -> mx.array:
        rows = x.astype(mx.float32)
        return mx.hadamard_transform(rows.reshape(*x.shape[:-1], -1, self.block)).reshape(x.shape)

    def inverse(self, y: mx.array) -> mx.array:
        return self.forward(y)
