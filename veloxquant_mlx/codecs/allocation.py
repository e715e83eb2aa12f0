"""Bits for components of falling size under a fixed sum: dynamic programming, and the greedy rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from .levels import distortion, lloyd_max

MOST_BITS = 8


@cache
def _normal() -> np.ndarray:
    return np.array([1.0] + [distortion(lloyd_max(bits)) for bits in range(1, MOST_BITS + 1)])


def normal_errors(variance: np.ndarray) -> np.ndarray:
    """Squared errors ``(D, 9)`` of normal components of ``variance`` ``(D,)`` with 0 to 8 bits by Lloyd and Max."""
    return np.asarray(variance, np.float64)[:, None] * _normal()


def best_bits(errors: np.ndarray, choices: Sequence[int], budget: int, unit: int = 1) -> np.ndarray:
    """Bits ``(D,)``, one of ``choices`` each and never rising, with the least sum of ``errors[i, bits[i]]``.

    Components of one width lie together in units of ``unit`` bits, which must be whole: they may take ``budget`` bits
    in all. Exact for that order, which is the best one where component ``i`` never needs fewer bits than ``i + 1``.
    Raises ValueError where no choice fits.
    """
    count, room = len(errors), budget // unit
    best = np.full((count + 1, room + 1), np.inf)
    best[0, 0] = 0.0
    widths = sorted(choices, reverse=True)
    picks = np.zeros((len(widths), *best.shape), np.int32)  # how many components got that width
    for width, pick in zip(widths, picks, strict=True):
        total = np.concatenate([[0.0], np.cumsum(errors[:, width])])
        found = best.copy()
        for n in range(1, count + 1):
            cost = -(-n * width // unit)
            if cost > room:
                break
            reached = best[: count + 1 - n, : room + 1 - cost] + (total[n:] - total[: count + 1 - n])[:, None]
            here = found[n:, cost:]
            better = reached < here
            here[better], pick[n:, cost:][better] = reached[better], n
        best = found
    if not np.isfinite(best[count]).any():
        raise ValueError(f"{budget} bits are too few for {count} components of {min(choices)} bits or more")
    left, t, bits = count, int(best[count].argmin()), np.zeros(count, np.uint8)
    for width, pick in zip(reversed(widths), picks[::-1], strict=True):
        n = int(pick[left, t])
        bits[left - n : left] = width
        left, t = left - n, t - -(-n * width // unit)
    return bits


def water_filled(errors: np.ndarray, pool: int, least: int = 1) -> np.ndarray:
    """Bits ``(D,)`` that sum to ``pool``: ``least`` each, then one after another where it helps most, up to 8."""
    gains = -np.diff(errors, axis=1)
    rows, bits = np.arange(len(errors)), np.full(len(errors), least, np.uint8)
    for _ in range(pool - least * len(errors)):
        gain = np.where(bits < MOST_BITS, gains[rows, np.minimum(bits, MOST_BITS - 1)], -np.inf)
        if not np.isfinite(gain.max()):
            break
        bits[gain.argmax()] += 1
    return bits
