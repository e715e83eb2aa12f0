"""Bytes of zipcache after a prompt: one block, two tiers per head, one bit per token that says which."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil


def zipcache(high: int, low: int, fraction: float) -> Callable[[int, tuple[int, int, int, int], int], int]:
    """Groups of 32 tokens for keys, their tiers padded to whole groups; two parameters per token of values."""

    def held(tokens: int, shape: tuple[int, int, int, int], itemsize: int) -> int:
        b, h, dk, dv = shape
        row, total = -(-dv // 32) * 32, 2 * 4 * -(-tokens // 32) + 2 * dv
        for n, bits in ((ceil(fraction * tokens), high), (tokens - ceil(fraction * tokens), low)):
            groups = -(-n // 32)
            total += dk * groups * (4 * bits + 4) + n * (row * bits // 8 + 4)
        return b * h * total

    return held
