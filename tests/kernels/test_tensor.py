"""The part of decode attention for CUDA's tensor cores, whose products the emulation makes by hand."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import emulation
from tests.kernels.cases import by_kernel, codec, expected, queries, store, stream
from veloxquant_mlx.attention.kernels import decode, launch, tensor
from veloxquant_mlx.attention.kernels.sides import sides
from veloxquant_mlx.attention.masks import Mask
from veloxquant_mlx.cache.store import Store

KEYS, VALUES = ("token", "channel", "codebook"), ("token", "codebook")
ROWS = ((1, 1), (2, 3), (3, 5), (4, 4), (6, 2), (8, 1), (8, 2), (16, 1))  # query heads per kv head, tokens
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
GROUPS = (8, 16, 32, 64, 128)


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> list[launch.Program]:
    """The programs that ran in the emulation of a CUDA device; short calls count as long ones."""
    ran = []

    def run(program: launch.Program, *arguments) -> list[mx.array]:
        ran.append(program)
        return emulation.run(program, *arguments)

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(launch, "backend", lambda: "cuda")
    monkeypatch.setattr(tensor, "LEAST", 1)
    monkeypatch.setattr(decode, "SHARE", 64)
    return ran


def error(store: Store, q: mx.array, mask: Mask = None, sinks: mx.array | None = None) -> float:
    """The relative error of the kernel."""
    out, wanted = np.array(by_kernel(store, q, mask, sinks).astype(mx.float32)), expected(store, q, mask, sinks)
    return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))


# Queries, levels, codes times steps and weights are rounded to half precision, by 2^-12 on average; sums are float32.
# Scores of size 3 are off by a few times that, so outputs as a whole by less than 2e-3. bfloat16 rounds them by 2^-9.
LIMIT = {mx.float16: 2e-3, mx.bfloat16: 4e-3, mx.float32: 2e-3}


@pytest.mark.parametrize("run", range(24))
def test_grid(run: int, programs: list[launch.Program]) -> None:
    """Layouts, widths, groups, head sizes, query rows and dtypes take turns; every pair of layouts meets every width on
    both sides.
    """
    keys, values, bits, value_bits = KEYS[run % 3], VALUES[run % 2], 1 + run // 6 % 4, 1 + (run + run // 6) % 4
    dim, (repeats, length), dtype = tensor.DIMS[run // 3 % 3], ROWS[run % 8], DTYPES[(run + run // 3) % 3]
    shape, sinks = (1 + run % 2, 2, dim, dim), run % 3
    held = store(
        stream(codec(keys, dim, bits, GROUPS[run % 5]), window=run % 7, sinks=sinks),
        stream(codec(values, dim, value_bits, GROUPS[(run + 2) % 5]), window=run % 5, sinks=sinks),
        270 + 3 * run,
        shape,
        dtype,
        later=length,
    )
    q = queries(shape, repeats, length, dtype)
    learned = mx.linspace(-2.0, 4.0, q.shape[1]) if run % 4 == 0 else None
    assert error(held, q, "causal" if run // 2 % 2 else None, learned) <= LIMIT[dtype]
    assert programs[0].name == "tensor"


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim, group, rows", [(128, 32, (4, 1)), (64, 64, (8, 2))])
def test_channels(bits: int, dim: int, group: int, rows: tuple[int, int]) -> None:
    """Keys in groups along the tokens, whose steps the queries take: two groups per tile, or one; one block of queries,
    or two.
    """
    shape = (1, 2, dim, dim)
    held = store(stream(codec("channel", dim, bits, group)), stream(codec("token", dim, bits)), 600, shape, mx.float16)
    assert error(held, queries(shape, *rows, mx.float16)) <= 2e-3


SHAPE = (2, 2, 64, 64)


def four_bits(n: int = 300, later: int = 3) -> Store:
    return store(stream(codec("channel", 64, 4)), stream(codec("token", 64, 4)), n, SHAPE, mx.float16, later=later)


@pytest.mark.parametrize("n", [64, 65, 129, 500])
@pytest.mark.parametrize("kind", ["token", "channel"])
def test_lengths(kind: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile, a tile that ends early, shares that get no tile."""
    monkeypatch.setattr(tensor, "shares", lambda *_: 3)
    held = store(stream(codec(kind, 64, 4)), stream(codec("codebook", 64, 4)), n, SHAPE, mx.float16)
    assert error(held, queries(SHAPE, 2, 1, mx.float16)) <= 2e-3


def test_packed_rows_out_of_sight(programs: list[launch.Program]) -> None:
    """Rows that are packed although they are newer than the first query, as where a layer reads another's rows."""
    held = store(stream(codec("codebook", 64, 4)), stream(codec("token", 64, 4)), 303, SHAPE, mx.float16)
    assert held.keys.n_sealed == 303
    assert error(held, queries(SHAPE, 2, 5, mx.float16), "causal") <= 2e-3
    assert programs[0].name == "tensor"


def test_nan_stays_in_its_query_row() -> None:
    held, q = four_bits(), queries(SHAPE, 3, 3, mx.float16)
    q[1, 4, 1, 5] = float("nan")
    out = np.array(by_kernel(held, q, "causal").astype(mx.float32))
    assert np.isnan(out[1, 4, 1]).all() and np.isnan(out).sum() == 64
    rest = ~np.isnan(out)
    np.testing.assert_allclose(out[rest], expected(held, q, "causal")[rest], atol=5e-3)  # of numbers up to one


def test_the_order_of_lanes_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    held, q = four_bits(), queries(SHAPE, 4, 2, mx.float16)
    once = by_kernel(held, q)
    monkeypatch.setattr(launch, "run", lambda *arguments: emulation.run(*arguments, backwards=True))
    np.testing.assert_array_equal(np.array(once), np.array(by_kernel(held, q)))


@pytest.mark.parametrize("why", ["mask", "queries", "bits", "half"])
def test_what_it_leaves_to_the_other_kernel(why: str, programs: list[launch.Program]) -> None:
    held = store(stream(codec("token", 64, 5 if why == "bits" else 4)), stream(codec("token", 64, 4)), 200, SHAPE)
    q = queries(SHAPE, 3, 6 if why == "queries" else 1)
    if why == "half":
        found = sides(held, 64)
        assert not isinstance(found, str)
        decode.attention(*found, q, 0.125, None, None, held.n, half=False)
    else:
        by_kernel(held, q, mx.ones((1, 200), mx.bool_) if why == "mask" else None)
    assert programs[0].name == "decode"
