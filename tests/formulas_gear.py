"""Bytes of ``gear`` after one prompt: all of it is one block."""

from __future__ import annotations

from collections.abc import Callable


def gear(fraction: float, rank: int = 4) -> Callable[[int, tuple[int, int, int, int], int], int]:
    """2 bits in groups of 32 with two float16 parameters, factors and exact numbers (4 bytes each) in float16.

    Keys take whole groups of tokens; a token's exact numbers are sought over all heads.
    """

    def held(tokens: int, shape: tuple[int, int, int, int], itemsize: int) -> int:
        b, h, dk, dv = shape
        n, width, r = -(-tokens // 32) * 32, -(-dv // 32) * 32, min(rank, tokens // 4)
        keys = n * dk * 2 // 8 + n // 32 * dk * 4 + 2 * r * (n + dk) * (r > 0)
        values = tokens * (width * 2 // 8 + width // 32 * 4) + 2 * r * (tokens + dv)
        keys += 4 * dk * 2 * int(fraction / 2 * tokens + 0.5)
        exact = 4 * tokens * 2 * max(int(fraction / 2 * h * dv + 0.5), 1)
        return b * (h * (keys + values) + exact)

    return held
