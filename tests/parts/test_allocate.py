"""Bits per layer: optimal against brute force, sums, monotone in the sensitivity, uniform for equal layers."""

# Wrong types are among the subjects here.
# pyright: reportArgumentType=false

import itertools

import numpy as np
import pytest

from veloxquant_mlx import QuantizerConfigError
from veloxquant_mlx.calibrate import CHOICES, LLOYD_MAX, MIN_MAX, allocate_bits, expected


def brute_force(costs: np.ndarray, choices, budget: int) -> tuple[int, float]:
    """The largest sum within the budget that the choices can make, and the least cost there."""
    grid = np.array(list(itertools.product(range(len(choices)), repeat=len(costs))))
    sums = np.array(choices)[grid].sum(axis=1)
    total = sums[sums <= budget].max()
    return total, costs[np.arange(len(costs)), grid].sum(axis=1)[sums == total].min()


@pytest.mark.parametrize("choices", [(2, 3, 4), (1, 2, 4), (2, 4, 8)])
def test_brute_force_over_all_allocations_of_six_layers(choices):
    """200 random cases each: 3**6 allocations; costs equal up to the order of six float64 additions."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        weights, beta = rng.lognormal(0, 2, 6), rng.uniform(1.5, 6)
        total = int(rng.integers(6 * choices[0], 6 * choices[-1] + 1))
        bits = allocate_bits(weights, total / 6, distortion=beta, choices=choices)
        costs = weights[:, None] * beta ** -np.array(choices, float)
        assert (sum(bits), pytest.approx(expected(weights, bits, beta), rel=1e-12)) == brute_force(
            costs, choices, total
        )
        assert sum(bits) == total or choices != (2, 3, 4)


def test_curves_of_their_own_that_are_not_convex():
    """Curves with steps, such as noise gives: still the optimum."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        values = np.sort(rng.random((6, 3)))[:, ::-1]
        curves = [dict(zip((2, 3, 4), row, strict=True)) for row in values]
        bits = allocate_bits([1.0] * 6, 3, distortion=curves, choices=(2, 3, 4))
        assert (18, pytest.approx(expected([1.0] * 6, bits, curves), rel=1e-12)) == brute_force(values, (2, 3, 4), 18)


def greedy(weights, average, beta, choices):
    """The paper's rule: raise the layer with the largest gain per bit until the sum is reached."""
    bits = [choices[0]] * len(weights)
    while sum(bits) < round(len(weights) * average):
        gains = [
            w * (beta**-b - beta ** -(b + 1)) if b < choices[-1] else -1 for w, b in zip(weights, bits, strict=True)
        ]
        bits[int(np.argmax(gains))] += 1
    return bits


@pytest.mark.parametrize("average", [2, 2.3, 3, 3.5, 4.9])
def test_sums_order_and_the_greedy_rule(average):
    rng = np.random.default_rng(2)
    for n in (1, 7, 30):
        weights = rng.lognormal(0, 2, n)
        bits = allocate_bits(weights, average, choices=(2, 3, 4, 5))
        assert sum(bits) == round(n * average)
        assert [bits[i] for i in np.argsort(weights)] == sorted(bits)  # non-decreasing in the sensitivity
        assert bits == greedy(weights, average, MIN_MAX, (2, 3, 4, 5))
        assert bits == allocate_bits(1000 * weights, average, choices=(2, 3, 4, 5))


@pytest.mark.parametrize("average", CHOICES)
def test_equal_layers_get_equal_bits(average):
    assert allocate_bits([0.3] * 30, average, distortion=LLOYD_MAX) == [average] * 30


def test_fractions_are_spread_over_neighbours_only():
    assert sorted(allocate_bits([1.0] * 8, 2.5)) == [2] * 4 + [3] * 4


def test_more_gain_for_more_spread():
    """Four layers, one 25 times as sensitive: raising it by a bit costs two quiet layers half a bit each."""
    weights = [1.0, 1.0, 25.0, 1.0]
    bits = allocate_bits(weights, 3, distortion=4.0)
    assert bits[2] > 3
    assert expected(weights, bits, 4.0) < expected(weights, [3] * 4, 4.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 3), "sensitivity"),
        (([1.0, -1.0], 3), "sensitivity"),
        (([1.0, np.nan], 3), "sensitivity"),
        (([1.0], 1.9), "average=1.9.*from 2 to 8"),
        (([1.0], 9), "average=9"),
        (([1.0], 3, 1.0), "distortion=1.0.*> 1"),
        (([1.0], 3, {3: 1.0}), r"distortion.*\[2, 4, 5, 6, 8\]"),
        (([1.0, 1.0], 3, [{2: 1.0}]), "1 curves.*each of 2 layers"),
        (([1.0], 3, 4.0, (3, 2)), "choices"),
        (([1.0], 3, 4.0, ()), "choices"),
        (([1.0], 3, 4.0, (2.0, 3)), "choices"),
    ],
)
def test_refusals(arguments, message):
    names = ("distortion", "choices")
    with pytest.raises(QuantizerConfigError, match=message):
        allocate_bits(*arguments[:2], **dict(zip(names, arguments[2:], strict=False)))
