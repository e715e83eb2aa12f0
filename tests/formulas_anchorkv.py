"""Bytes of anchorkv after a prompt, for keys and values of equal or different sizes."""

from __future__ import annotations

from collections.abc import Callable
from math import floor


def anchorkv(theta: float, window: int, fraction: float) -> Callable[[int, tuple[int, int, int, int], int], int]:
    """Anchors as they came; 3 bytes for every other row and side, a bit if there are residuals, and 2 bytes for the
    place of an anchor before the window. 2-bit residuals of all heads share what is left, if anchors took 16 bits.
    """

    def held(tokens: int, shape: tuple[int, int, int, int], itemsize: int) -> int:
        b, h, dk, dv = shape
        k = min(tokens, max(window, floor(tokens * fraction)))
        others, early = tokens - k, (k - min(tokens, window)) * (1 if tokens <= 256 else 2)
        words = -(-tokens // 32) * 4 if others else 0
        base = h * (k * 2 * (dk + dv) + 2 * (3 * others + words + early))
        key, value = (-(-d // 16) * 4 + 2 for d in (dk, dv))
        room = theta * h * tokens * 2 * (dk + dv) - base
        both = max(0, floor(2 * room / (key + value)))
        nk, nv = both // 2, both - both // 2
        if nk * key + nv * value > room:
            nv -= nv > 0
        nk, nv = min(nk, h * others), min(nv, h * others)
        anchors = h * k * itemsize * (dk + dv) + 2 * h * (3 * others + early) + h * words * ((nk > 0) + (nv > 0))
        return b * (anchors + nk * key + nv * value)

    return held
