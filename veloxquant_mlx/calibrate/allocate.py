"""Bits per layer under a fixed sum: the integer allocation of RateQuant, solved exactly.

Paper: Zuo et al., "RateQuant: Optimal Mixed-Precision KV Cache Quantization via Rate-Distortion Theory",
arXiv:2605.06675. The paper allocates per head as well; ``bit_width_inlier`` has one entry per layer, so this does too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.types import is_int
from ..methods._method import refuse

Curve = Mapping[int, float]
"""Distortion at each number of bits, in any unit that all layers share."""

# How many times smaller the error gets per bit: log-linear fits on {2, 3, 4} bits of a Gaussian.
MIN_MAX = 5.02  # uniform levels between minimum and maximum of groups of 32
LLOYD_MAX = 3.52  # levels of Lloyd and Max
CHOICES = (2, 3, 4, 5, 6, 8)


def allocate_bits(
    sensitivity: Sequence[float],
    average: float,
    *,
    distortion: float | Curve | Sequence[Curve] = MIN_MAX,
    choices: Sequence[int] = CHOICES,
) -> list[int]:
    """The bits ``b_i``, one of ``choices`` per layer, that minimise the sum of ``sensitivity[i] * D(b_i)``.

    They sum to ``round(N * average)``, or to the largest sum below it that the choices can make. ``distortion`` is the
    factor beta of ``D(b) = beta**-b``, a curve, or one curve per layer; it belongs to the quantiser, and another one's
    can turn the order of layers round. Only ratios of sensitivities count. Equal layers get equal bits where the
    average allows it. For convex curves this is the paper's greedy rule; dynamic programming needs no convexity and
    no neighbouring choices. Raises ``QuantizerConfigError``.

    >>> allocate_bits([1.0, 4.0, 30.0, 2.0], 3)
    [2, 3, 4, 3]
    """
    costs = _costs(sensitivity, distortion, _checked_choices(choices))
    if not choices[0] <= average <= choices[-1]:
        valid = f"a number from {choices[0]} to {choices[-1]}, the smallest and the largest choice"
        refuse("average", average, valid, "Change the average or the choices.")
    budget = round(len(costs) * average)
    best, picks = np.zeros(1), []  # best[t]: the least cost of the layers so far with t bits in all
    for row in costs:
        reached = np.full((len(choices), min(len(best) - 1 + choices[-1], budget) + 1), np.inf)
        for line, cost, bits in zip(reached, row, choices, strict=True):
            n = min(len(best), max(len(line) - bits, 0))
            line[bits : bits + n] = best[:n] + cost
        picks.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    total = int(np.flatnonzero(np.isfinite(best))[-1])
    out = []
    for pick in reversed(picks):
        out.append(choices[pick[total]])
        total -= out[-1]
    return out[::-1]


def expected(
    sensitivity: Sequence[float], bits: Sequence[int], distortion: float | Curve | Sequence[Curve] = MIN_MAX
) -> float:
    """The sum of ``sensitivity[i] * D(bits[i])``: what ``allocate_bits`` minimises."""
    choices = sorted(set(bits))
    costs = _costs(sensitivity, distortion, choices)
    return sum(float(row[choices.index(b)]) for row, b in zip(costs, bits, strict=True))


def _costs(
    sensitivity: Sequence[float], distortion: float | Curve | Sequence[Curve], choices: Sequence[int]
) -> np.ndarray:
    """The cost of every layer at every choice, ``(N, choices)`` float64."""
    weights = np.array(sensitivity, dtype=np.float64)
    if weights.ndim != 1 or not weights.size or not np.isfinite(weights).all() or (weights < 0).any():
        refuse("sensitivity", sensitivity, "one finite number >= 0 per layer", "Measure it with layer_sensitivity.")
    if isinstance(distortion, Mapping) or not isinstance(distortion, Sequence):
        distortion = [_curve(distortion, choices)] * len(weights)
    if len(distortion) != len(weights):
        refuse("distortion", f"{len(distortion)} curves", f"one curve for each of {len(weights)} layers", "Give them.")
    missing = [b for b in choices if any(b not in curve for curve in distortion)]
    if missing:
        refuse("distortion", distortion, f"defined at every choice, {missing} too", "Measure it there.")
    return weights[:, None] * np.array([[curve[b] for b in choices] for curve in distortion], dtype=np.float64)


def _curve(distortion: float | Curve, choices: Sequence[int]) -> Curve:
    if isinstance(distortion, Mapping):
        return distortion
    if not math.isfinite(distortion) or distortion <= 1:
        refuse("distortion", distortion, "a number > 1 or a curve", f"Use {MIN_MAX} for min/max levels.")
    return {b: float(distortion) ** -b for b in choices}


def _checked_choices(choices: Sequence[int]) -> Sequence[int]:
    rising = all(a < b for a, b in itertools.pairwise(choices))
    if not choices or not all(is_int(b) and b > 0 for b in choices) or not rising:
        refuse("choices", choices, "a rising sequence of ints >= 1", f"The default is {CHOICES}.")
    return choices
