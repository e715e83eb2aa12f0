"""Bytes that methods on principal axes hold, by the formulas of the specification."""

from __future__ import annotations

from collections.abc import Callable

from veloxquant_mlx.cache.store import GROW
from veloxquant_mlx.core.types import SEAL

Shape = tuple[int, int, int, int]  # B, H, Dk, Dv


def up(n: int, step: int) -> int:
    return -(-n // step) * step


def spectral(fit: int) -> Callable[[int, Shape, int], int]:
    """One bit on every axis and 16 for the row; keys have 4 sign bits and 16 for their error's size as well."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, *dims = shape
        if tokens < fit:
            return b * h * tokens * sum(dims) * itemsize
        n = tokens // SEAL * SEAL
        rows = up(n, GROW) * (sum(up(d, 8) // 8 + 2 for d in dims) + 1 + 2) + (tokens - n) * sum(dims) * itemsize
        return b * h * (rows + sum(4 * d * d + 5 * d for d in dims))

    return held


def kvtc(budget: int, fit: int, window: int) -> Callable[[int, Shape, int], int]:
    """Of 0 or 4 bits the budget holds as many 4s as fit; axes, spreads and a mean in float32."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, *dims = shape
        n = max(0, tokens - 4 - window) // 32 * 32 if tokens >= 4 + fit else 0
        total = (tokens - n) * sum(dims) * itemsize * b * h
        for d in dims:
            axes = min((budget - 16) // 4, d)
            total += b * h * up(n, GROW) * (-(-4 * axes // 8) + 2)
            total += b * h * (4 * (d * axes + axes + d) + d) if n else 0
        return total

    return held


def svdq(bits: tuple[int, ...], rank: int, fit: int) -> Callable[[int, Shape, int], int]:
    """Keys: equal slices of ``rank`` channels, two float16 per group of 32; axes with bits and a mean in float32."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        n, each = max(0, tokens - 32) // 32 * 32 if tokens >= fit else 0, rank // len(bits)
        kept = each * sum(bit > 0 for bit in bits)
        packed = up(n, GROW) * (each * sum(bits) + kept) // 8  # 32 bits of parameters for 32 numbers
        fitted = b * h * (4 * (dk * kept + dk) + rank) if n else 0
        return b * h * (packed + itemsize * ((tokens - n) * dk + up(tokens, GROW) * dv)) + fitted

    return held
