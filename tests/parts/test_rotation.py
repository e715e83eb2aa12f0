"""Rotations: exact, reproducible, and as good as the theory of TurboQuant says."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx.artifacts import InMemoryArtifactStore
from veloxquant_mlx.codecs.codebook import ScalarCodebook
from veloxquant_mlx.codecs.levels import distortion, lloyd_max
from veloxquant_mlx.codecs.transformed import Transformed
from veloxquant_mlx.core.exceptions import QuantizerConfigError
from veloxquant_mlx.transforms.rotation import RandomHadamard, Rotation, haar, hadamard_is_safe, rotation

DIMS = [64, 80, 96, 112, 128, 160, 192, 256]


def rows(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("dim", DIMS)
def test_a_rotation_keeps_dot_products_and_inverts(dim):
    turn = rotation(dim, seed=3)
    x, q = rows((2, 3, 5, dim), 1), rows((2, 3, 5, dim), 2)
    # float32: D additions of numbers of order 1
    np.testing.assert_allclose(turn.inverse(turn.forward(x)), x, atol=1e-5)
    np.testing.assert_allclose((turn.on_query(q) * turn.forward(x)).sum(-1), (q * x).sum(-1), atol=1e-4)
    matrix = np.array(turn.forward(mx.eye(dim)), dtype=np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-5)


@pytest.mark.parametrize("dim", DIMS)
def test_hadamard_only_where_it_is_its_own_inverse(dim):
    safe = dim in (64, 96, 128, 192, 256)
    assert hadamard_is_safe(dim) == safe
    assert isinstance(rotation(dim, 0), RandomHadamard if safe else Rotation)


@pytest.mark.parametrize("dim", [1, 3, 6, 20, 28, 36, 63, 576])
def test_sizes_that_mlx_gets_wrong_are_not_trusted(dim):
    assert not hadamard_is_safe(dim)


@pytest.mark.parametrize("dim", [80, 128])
def test_seed_and_tag_decide(dim):
    def matrix(seed: int, tag: int) -> np.ndarray:
        return np.array(rotation(dim, seed, tag).forward(mx.eye(dim)))

    assert rotation(dim, 1, 0) is rotation(dim, 1, 0)
    assert not np.array_equal(matrix(1, 0), matrix(1, 1)) and not np.array_equal(matrix(1, 0), matrix(2, 0))
    # independent: the inner product of two sign vectors has a deviation of sqrt(D), of two Haar matrices of 1
    assert abs((matrix(1, 0) * matrix(1, 1)).sum()) < 4 * np.sqrt(dim)


def test_haar_values_are_pinned():
    # numpy's PCG64 stream is stable by policy; LAPACKs agree to rounding once the sign is fixed
    expected = [
        [0.236775720046358, 0.552984171466415, 0.798840262195222],
        [-0.613685722881656, 0.722555728096186, -0.318281405876325],
        [-0.753211186804702, -0.414875554718513, 0.510442143802075],
    ]
    np.testing.assert_allclose(haar(3, 42), expected, atol=1e-12)


def test_haar_is_uniform():
    # each entry has variance 1/D; without the sign fix the diagonal is one-sided
    diagonals = np.array([np.diag(haar(8, seed)) for seed in range(500)])
    assert abs(diagonals.mean()) < 5 / np.sqrt(8 * diagonals.size)
    assert diagonals.var() == pytest.approx(1 / 8, rel=0.1)


def test_rotations_serve_any_thread():
    failures: list[BaseException] = []
    turns = [rotation(dim, 77) for dim in (64, 80)]

    def work() -> None:
        try:
            for turn, dim in zip(turns, (64, 80), strict=True):
                mx.eval(turn.inverse(turn.forward(mx.ones((1, dim)))))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


@pytest.mark.parametrize("dim", [64, 80])
def test_a_store_keeps_rotations(dim):
    store = InMemoryArtifactStore()
    first, values = rotation(dim, 5, 0, store), rotation(dim, 5, 1, store)
    assert store.exists("rotation", d=dim, seed=5)
    x = rows((3, dim))
    for turn, tag in ((first, 0), (values, 1)):
        assert mx.array_equal(turn.forward(x), rotation(dim, 5, tag, store).forward(x))
        np.testing.assert_allclose(turn.forward(x), rotation(dim, 5, tag).forward(x), atol=1e-5)
    store.save_rotation_matrix(mx.ones((dim, dim)), dim, 5)
    with pytest.raises(QuantizerConfigError, match="not an orthogonal"):
        rotation(dim, 5, 0, store)


@pytest.mark.parametrize("seed", [-1, True, 1.5])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(QuantizerConfigError, match="seed"):
        rotation(64, seed)


def relative_errors(x: mx.array, bits: int, seeds: range) -> np.ndarray:
    """Squared error over squared norm under Haar rotations with the sphere's codebook, ``(seeds, rows)``."""
    dim = x.shape[-1]
    codec = ScalarCodebook(dim, lloyd_max(bits, dim), bits)
    out = []
    for seed in seeds:
        turned = Transformed(codec, Rotation(mx.array(haar(dim, seed).astype(np.float32))))
        error = turned.decode(turned.encode(x)) - x
        out.append(np.array((error * error).sum(-1) / (x * x).sum(-1)).reshape(-1))
    return np.array(out)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_distortion_equals_the_table(bits):
    errors = relative_errors(rows((1, 1, 4000, 128)), bits, range(2))
    assert errors.mean() == pytest.approx(distortion(lloyd_max(bits, 128), 128), rel=0.01)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_worst_case_rows_meet_the_theorem(bits):
    one_hot, flat = np.eye(64)[0], np.ones(64)
    x = np.stack([one_hot, flat, flat * (-1.0) ** np.arange(64)]).astype(np.float32)
    errors = relative_errors(mx.array(x)[None, None], bits, range(200)).mean(0)
    # TurboQuant, theorem 1, in expectation over the rotation
    assert (errors <= np.sqrt(3) * np.pi / 2 * 4.0**-bits).all()
