"""Bytes of amc after a prompt: one block of ranked tokens and a window of 32 exact ones."""

from __future__ import annotations

from collections.abc import Callable
from math import floor


def amc(high: float, mid: float, group: int, fit: int) -> Callable[[int, tuple[int, int, int, int], int], int]:
    """Float16 rows; a third and a sixteenth of the numbers at 8 and 4 bits with float16 steps; 2 bits per token.

    Float32 axes for the third, and two float32 thresholds per head.
    """

    def held(tokens: int, shape: tuple[int, int, int, int], itemsize: int) -> int:
        b, h, *dims = shape
        n = tokens - 32 if tokens >= fit else 0
        top, middle = floor(n * high + 0.5), floor(n * mid + 0.5)
        total = 0
        for d in dims:
            k, few = round(0.336 * d), round(d / 16)
            total += top * 2 * d + middle * (k + 2 * -(-k // group)) + (n - top - middle) * (-(-few // 2) + 2)
            total += (-(-n // 16) * 4 + 4 * d * k) * (n > 0) + (tokens - n) * d * itemsize
        return b * h * (total + 8 * (n > 0))

    return held
