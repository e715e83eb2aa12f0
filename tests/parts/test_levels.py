"""Scalar codebooks against the published tables and against their own optimality conditions."""

import numpy as np
import pytest
from scipy import stats

from veloxquant_mlx.codecs.levels import distortion, lloyd_max, residual_levels
from veloxquant_mlx.core.exceptions import QuantizerConfigError

# Max 1960 / Lloyd 1982: bits -> (squared error, positive levels)
GAUSSIAN = {
    1: (0.363380, [0.7979]),
    2: (0.117482, [0.4528, 1.5104]),
    3: (0.034548, [0.2451, 0.7560, 1.3439, 2.1520]),
    4: (0.009501, [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326]),
    5: (0.002505, None),
    6: (0.000644, None),
}
SPHERE = {  # dim -> errors at 1 to 4 bits
    64: (0.3584, 0.1145, 0.0334, 0.0091),
    80: (0.3594, 0.1151, 0.0336, 0.0092),
    96: (0.3601, 0.1155, 0.0338, 0.00925),
    128: (0.3609, 0.1160, 0.0340, 0.00932),
    256: (0.3621, 0.1167, 0.0343, 0.0094),
}
SPHERE_LEVELS_128 = {1: [0.7994], 2: [0.4524, 1.5052], 3: [0.2443, 0.7532, 1.3364, 2.1313]}


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_gaussian_table(bits):
    error, positive = GAUSSIAN[bits]
    levels = lloyd_max(bits)
    assert distortion(levels) == pytest.approx(error, abs=6e-7)  # half a unit of the last digit printed
    if positive is not None:
        np.testing.assert_allclose(levels[levels.size // 2 :], positive, atol=1.1e-4)


@pytest.mark.parametrize("dim", SPHERE)
def test_sphere_table(dim):
    errors = [distortion(lloyd_max(bits, dim), dim) for bits in range(1, 5)]
    np.testing.assert_allclose(errors, SPHERE[dim], atol=6e-5)


@pytest.mark.parametrize("bits", SPHERE_LEVELS_128)
def test_sphere_levels(bits):
    levels = lloyd_max(bits, 128)
    np.testing.assert_allclose(levels[levels.size // 2 :], SPHERE_LEVELS_128[bits], atol=3e-4)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_level_is_the_mean_of_its_cell(bits):
    levels = lloyd_max(bits)
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    means = -np.diff(stats.norm.pdf(edges)) / np.diff(stats.norm.cdf(edges))
    # the cancellation in the differences of cdf leaves 1e-16 / 1e-6
    np.testing.assert_allclose(levels, means, atol=1e-8)
    assert np.array_equal(levels, -levels[::-1]) and (np.diff(levels) > 0).all()
    assert distortion(levels) <= np.sqrt(3) * np.pi / 2 * 4.0**-bits


def test_distortion_is_that_of_samples():
    levels, x = lloyd_max(3, 16), np.random.default_rng(0).normal(size=(20_000, 16))
    z = np.sqrt(16) * x / np.linalg.norm(x, axis=1, keepdims=True)
    error = (np.abs(z[..., None] - levels).min(-1) ** 2).mean()
    assert error == pytest.approx(distortion(levels, 16), rel=0.02)  # 320,000 samples


@pytest.mark.parametrize("bits", [1, 3, 6, 8])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 16, 96])
def test_levels_of_small_spheres(dim, bits):
    levels = lloyd_max(bits, dim)
    assert np.abs(levels).max() <= np.sqrt(dim) and np.array_equal(levels, -levels[::-1])
    if dim > 1:
        assert distortion(levels, dim) <= distortion(lloyd_max(bits), dim)  # better than normal levels there
    if dim == 3:  # its coordinates are uniform, of variance 1
        assert distortion(levels, dim) == pytest.approx(4.0**-bits, rel=1e-6)


@pytest.mark.parametrize("bits, most", [(1, 0.11748), (2, 0.01141), (3, 0.00108), (4, 0.00010)])
def test_joint_stages_beat_greedy_stages(bits, most):
    first, second = residual_levels(bits)
    joint = distortion((first[:, None] + second).reshape(-1))
    single = lloyd_max(bits)
    greedy = distortion((single[:, None] + np.sqrt(distortion(single)) * single).reshape(-1))
    assert joint <= most + 6e-6 and joint <= greedy
    assert distortion(lloyd_max(2 * bits)) <= joint + 1e-9  # one codebook of all bits is the bound
    assert distortion(first) <= 1.35 * distortion(single)  # the first stage alone is a usable coarse row
    assert first.mean() == pytest.approx(0, abs=1e-12) and second.mean() == pytest.approx(0, abs=1e-12)


def test_one_bit_stages_are_the_two_bit_codebook():
    first, second = residual_levels(1)
    np.testing.assert_allclose([first[1], second[1]], [0.9816, 0.5288], atol=1e-4)
    assert distortion(first) == pytest.approx(0.397, abs=5e-4)


@pytest.mark.parametrize("call", [
    lambda: lloyd_max(0), lambda: lloyd_max(9), lambda: lloyd_max(True), lambda: lloyd_max(2, 0),
    lambda: residual_levels(5), lambda: residual_levels(0),
])  # fmt: skip
def test_bad_settings_are_refused(call):
    with pytest.raises(QuantizerConfigError, match="must be|need a dimension"):
        call()
