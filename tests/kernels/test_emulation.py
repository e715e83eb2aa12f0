"""The emulation itself: it must do what a group of lanes does, and notice what a GPU would not forgive."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.kernels import emulation
from tests.matrix import identical
from veloxquant_mlx.attention.kernels import launch
from veloxquant_mlx.attention.kernels.launch import Program


@pytest.fixture
def kernel():
    """Runs a kernel by its text, on ``x`` and with an ``out`` of 64 numbers, in one group of two warps."""

    def run(source: str, x: mx.array, backwards: bool = False) -> mx.array:
        program = Program("test", source, {}, ("x",), ("out",), 2, headers=())
        return emulation.run(program, [x], [((64,), mx.float32)], (1, 1, 1), backwards)[0]

    return run


X = mx.random.normal((64,), key=mx.random.key(1))
AT = mx.arange(64)


@pytest.mark.parametrize("backwards", [False, True])
def test_shuffles(kernel, backwards: bool) -> None:
    """Within a warp: from the partner, and from one lane to all."""
    got = kernel(
        "const float a = x[WARP * 32 + LANE]; out[WARP * 32 + LANE] = shfl_xor(a, 5) - shfl(a, 3);", X, backwards
    )
    assert identical(got, X[AT ^ 5] - X[AT // 32 * 32 + 3])


def test_any_lane(kernel) -> None:
    got = kernel("out[WARP * 32 + LANE] = any_lane(x[WARP * 32 + LANE] > 0);", mx.where(AT == 40, 1.0, -1.0))
    assert identical(got, (AT >= 32).astype(mx.float32))


SWAP = "SHARED float y[64]; const int i = WARP * 32 + LANE; y[i] = x[i]; {} out[i] = y[63 - i];"


def test_barriers_and_races(kernel) -> None:
    """Shared memory read before all have written is told by the order of lanes."""
    both = partial(kernel, SWAP.format("BARRIER();")), partial(kernel, SWAP.format(""))
    right, wrong = ([run(X + i, bool(i)) - i for i in range(2)] for run in both)
    assert all(bool(mx.allclose(out, X[63 - AT], atol=1e-6)) for out in right)  # one was added and taken away
    assert not bool(mx.allclose(*wrong))


@pytest.mark.parametrize("source", ["out[LANE] = x[LANE + WARP * 33];", "out[LANE + WARP * 33] = x[LANE];"])
def test_arrays_have_an_end(kernel, source: str) -> None:
    with pytest.raises(AssertionError, match="beyond the end"):
        kernel(source, X)


def test_what_is_not_written_is_nan(kernel) -> None:
    assert mx.isnan(kernel("if (LANE < 31) out[WARP * 32 + LANE] = 1.0f;", X)).sum().item() == 2


@pytest.mark.parametrize("place", [Path("/some where/kernels"), Path('/a"b'), None])
def test_what_the_compiler_gets(place: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's reads the sources where they are, if a line can say where; Metal's gets them all."""
    monkeypatch.setattr(launch, "FOLDER", place)
    monkeypatch.setattr(launch, "text", lambda name: f"text of {name}")
    given: list[dict[str, Any]] = []
    for back in ("cuda", "metal"):
        monkeypatch.setattr(mx.fast, f"{back}_kernel", lambda **names: given.append(names))
        launch._compiled(back, Program("x", '{\n#include "b.h"\n}\n', {"A": 1}, ("x",), ("y",), 1, ("h.h",)), ())
    cuda, metal = given
    assert metal["source"] == "text of metal_lanes.h\n{\ntext of b.h\n}\n"
    assert metal["header"] == "text of metal.h\n#define A 1\ntext of h.h\n"
    if place == Path("/some where/kernels"):
        at = "/some where/kernels"
        assert cuda["source"] == f'#include "{at}/cuda_lanes.h"\n{{\n#include "{at}/b.h"\n}}\n'
        assert cuda["header"] == f'#include "{at}/cuda.h"\n#define A 1\n#include "{at}/h.h"\n'
    else:
        assert cuda["source"] == "text of cuda_lanes.h\n{\ntext of b.h\n}\n"
