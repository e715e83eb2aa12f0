"""Bytes of adakv: whole blocks of keys, and of values all but the newest block; bits by head at a fixed sum."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm


def adakv(block: int, least: int = 2, target: float = 2.5) -> Callable[[int, tuple[int, int, int, int], int], int]:
    """Groups of 32; the bits beyond the fewest lie in planes of one bit. A byte per head and block names its bits."""

    def held(tokens: int, shape: tuple[int, int, int, int], itemsize: int) -> int:
        b, h, dk, dv = shape
        planes, total, step = int(h * (target - least)), 0, lcm(64, block)
        for dim, row, window in ((dk, dk, 0), (dv, -(-dv // 32) * 32, block)):
            sealed = max(tokens - window, 0) // block * block
            room = -(-sealed // step) * step
            total += room * row * (h * (least / 8 + 4 / 32) + planes / 8) + room // block * h
            total += h * (tokens - sealed) * dim * itemsize
        return b * int(total)

    return held
