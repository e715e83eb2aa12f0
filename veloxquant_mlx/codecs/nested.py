"""Affine groups on nested grids: codes get fewer bits by whole-number arithmetic, without a second rounding.

The highest code of 8 bits is 17 times that of 4 bits, and that is 5 times the one of 2 bits. So every level of the
coarse grid is one of the fine grid, and because 17 and 5 are odd no fine level lies halfway between two coarse ones:
what comes out is what the fine rows would give by themselves, through any number of steps down.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .affine import ChannelAffine, TokenAffine, _Affine
from .base import Codec, Codes, Readable, compute_dtype
from .packing import pack, unpack


def ratio(high: int, low: int) -> int:
    """Fine steps in a coarse one, for codes of ``high`` and ``low`` bits; 0 where the grids are not nested.

    One bit is never nested: it stores the means of two halves, not the ends of the range.
    """
    steps, rest = divmod((1 << high) - 1, (1 << low) - 1)
    return 0 if rest or steps % 2 == 0 or (low == 1 and high > 1) else steps


def grids(bits: Sequence[int]) -> list[int]:
    """For falling ``bits``: the bits of the grid that each width takes its levels from, its own or a finer one."""
    out: list[int] = []
    for i, width in enumerate(bits):
        out.append(out[-1] if i and ratio(bits[i - 1], width) else width)
    return out


class _Nested(_Affine):
    """Codes of ``bits`` whose scales are those of the finer ``grid``: float16 could not hold their multiples."""

    def _nest(self, grid: int) -> None:
        self.grid, self.steps = grid, ratio(grid, self.bits)

    def demote(self, codes: Codes, into: Codec) -> Codes:
        """On a nested grid whole numbers only; otherwise the decoded rows are encoded again."""
        if not isinstance(into, _Nested) or into.grid != self.grid:
            return into.encode(self.decode(codes))
        steps = ratio(self.bits, into.bits)
        fine = unpack(codes["words"], self.bits).astype(mx.uint16)
        return codes | {"words": pack((fine + steps // 2) // steps, into.bits)}

    def _wide(self, codes: Codes, dtype: mx.Dtype) -> Codes:
        return codes | {"scales": (codes["scales"].astype(mx.float32) * self.steps).astype(dtype)}

    def _decode(self, codes: Codes, dtype: mx.Dtype) -> mx.array:
        return super()._decode(self._wide(codes, mx.float32), dtype)

    def _product(self, x: mx.array, codes: Codes, transpose: bool) -> mx.array:
        return super()._product(x, self._wide(codes, compute_dtype(x.dtype)), transpose)

    def readable(self, codes: Codes) -> Readable | None:
        return super().readable(self._wide(codes, mx.float32))


class NestedKeys(_Nested, ChannelAffine):
    """``ChannelAffine`` on the grid of ``grid`` bits."""

    def __init__(self, bits: int, group: int, grid: int) -> None:
        super().__init__(bits, group)
        self._nest(grid)


class NestedValues(_Nested, TokenAffine):
    """``TokenAffine`` on the grid of ``grid`` bits."""

    def __init__(self, bits: int, group: int, grid: int, *, dim: int) -> None:
        super().__init__(bits, group, dim=dim)
        self._nest(grid)
