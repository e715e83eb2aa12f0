"""Rotations measured from rotary modules: they compose with what the module itself did, whatever its scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope

from tests.models import tiny
from veloxquant_mlx.core.exceptions import QuantizerConfigError
from veloxquant_mlx.models.inspect import cache_slots
from veloxquant_mlx.models.rope import Rotation, UnknownRotation, bare_rotation, probe_rotation

D = 64
LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG: dict[str, Any] = {"short_factor": [1.0] * 32, "long_factor": [1.0 + i for i in range(32)]}


def scaled(kind: str, /, traditional: bool = False, **config: Any) -> Callable[[], Any]:
    return lambda: initialize_rope(D, 1e4, traditional, {"rope_type": kind, **config}, 131072)


MODULES: dict[str, Callable[[], Any]] = {
    "plain": lambda: nn.RoPE(D),
    "traditional": lambda: nn.RoPE(D, traditional=True),
    "partial": lambda: nn.RoPE(16),
    "large base": lambda: nn.RoPE(D, base=5e6),
    "linear": scaled("linear", factor=4.0),
    "llama3": scaled("llama3", **LLAMA3),
    "yarn": scaled("yarn", factor=16.0, original_max_position_embeddings=4096),
    "yarn traditional": scaled("yarn", traditional=True, factor=16.0, original_max_position_embeddings=4096),
    "longrope": scaled("longrope", original_max_position_embeddings=4096, **LONG),
    "proportional": scaled("proportional", partial_rotary_factor=0.25),
}


def largest(x: mx.array) -> float:
    return float(np.abs(np.array(x.astype(mx.float32))).max())


@pytest.mark.parametrize("offset", [1, 100, 5000, 100_000])
@pytest.mark.parametrize("name", MODULES)
def test_composes_with_the_module(name: str, offset: int) -> None:
    module = MODULES[name]()
    rotation = probe_rotation(module, D)
    x = mx.random.normal((2, 3, 5, D), key=mx.random.key(0))
    moved, expected = bare_rotation(rotation, module(x, offset=10), offset), module(x, offset=10 + offset)
    # The module rounds its own angle (up to 14 + offset radians) to float32; entries are below 5, YaRN's below 7.
    assert largest(moved - expected) < 14 * (14 + offset) * 2**-24 + 1e-5


def test_rates_are_those_of_the_formula() -> None:
    rotation = probe_rotation(nn.RoPE(D, base=1e4), D)
    expected = 1e4 ** (-np.arange(D // 2) / (D // 2))
    # Relative: MLX computes its frequencies as exp2 of a float32 exponent up to 13.3, half an ulp of that is 5e-7.
    np.testing.assert_allclose(np.abs(rotation.rate), np.tile(expected, 2), rtol=1e-6)


@pytest.mark.parametrize("name", ["yarn", "longrope"])
def test_no_magnitude_factor(name: str) -> None:
    module = MODULES[name]()
    x = mx.random.normal((1, 1, 4, D), key=mx.random.key(0))
    assert np.linalg.norm(np.array(module(x, offset=0))) > 1.05 * np.linalg.norm(np.array(x))
    moved = bare_rotation(probe_rotation(module, D), x, 77)
    np.testing.assert_allclose(np.linalg.norm(moved, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(mx.float32, 1e-6), (mx.float16, 1e-3), (mx.bfloat16, 8e-3)])
def test_dtype_is_kept_and_negative_offsets_undo(dtype: mx.Dtype, tolerance: float) -> None:
    rotation = probe_rotation(nn.RoPE(D), D)
    x = mx.random.normal((1, 2, 3, D), key=mx.random.key(0)).astype(dtype)
    there = bare_rotation(rotation, x, 1234)
    back = bare_rotation(rotation, there, -1234)
    assert there.dtype == back.dtype == dtype
    assert largest(back - x) <= 4 * tolerance  # entries below 4, two roundings of half an ulp


def test_nothing_to_do_returns_the_very_array() -> None:
    x = mx.ones((1, 1, 2, D))
    assert bare_rotation(None, x, 100) is x
    assert bare_rotation(probe_rotation(nn.RoPE(D), D), x, 0) is x


def test_offset_needs_no_evaluation() -> None:
    rotation = probe_rotation(nn.RoPE(D), D)
    x = mx.random.normal((1, 1, 2, D), key=mx.random.key(0))
    moved = mx.compile(lambda a: bare_rotation(rotation, a, 9))(x)  # tracing fails on any evaluation
    assert mx.allclose(moved, bare_rotation(rotation, x, 9), atol=1e-6)


def test_rotation_of_the_last_channels() -> None:
    rotation = probe_rotation(nn.RoPE(16), 24).at_end()
    x = mx.random.normal((1, 1, 2, 24), key=mx.random.key(0))
    moved = bare_rotation(rotation, x, 3)
    assert mx.array_equal(moved[..., :8], x[..., :8])
    expected = bare_rotation(probe_rotation(nn.RoPE(16), 16), x[..., 8:], 3)
    assert mx.array_equal(moved[..., 8:], expected)


@pytest.mark.parametrize(
    "module, match",
    [
        (initialize_rope(D, 1e4, False, {"rope_type": "dynamic", "factor": 4.0}, 2048), "changes with the position"),
        (nn.Linear(D, D), "cannot be called as a rotary module"),
        (lambda x, offset: x[..., ::-1], "does not rotate pairs"),
        (lambda x, offset: x @ mx.ones((D, D)), "does not rotate pairs"),
    ],
)
def test_other_modules_are_refused(module: Any, match: str) -> None:
    with pytest.raises(QuantizerConfigError, match=match):
        probe_rotation(module, D)


def test_unknown_rotation_says_what_to_do() -> None:
    with pytest.raises(QuantizerConfigError, match=r"cannot be moved.*it is odd.*Use a method that keeps"):
        bare_rotation(UnknownRotation("it is odd"), mx.ones((1, 1, 1, D)), 1)


FIRST_LAYER = [
    "llama",
    "llama_llama3",
    "llama_yarn",
    "mistral",
    "qwen3",
    "phi3",
    "phi3_long",
    "minicpm3",
    "gpt_neox",
    "deepseek_v2",
]


@pytest.mark.parametrize("name", FIRST_LAYER)
def test_cached_keys_of_a_model_move_as_its_own_positions_do(name: str) -> None:
    # Keys of the first layer depend on the token and its position alone: the same tokens 20 positions later.
    model = tiny.build(name)
    ids, shift = tiny.tokens(6), 20
    near, far = make_prompt_cache(model), make_prompt_cache(model)
    model(ids, cache=near)
    model(mx.concatenate([tiny.tokens(shift, seed=1), ids], axis=1), cache=far)
    layer = cache_slots(model)[0].layer
    assert layer is not None and isinstance(layer.rope, Rotation)
    moved = bare_rotation(layer.rope, near[0].keys[..., :6, :], shift)
    expected = far[0].keys[..., shift : shift + 6, :]
    # float32 matmuls over 64 channels in two batch shapes, plus angles up to 26 radians: relative 64 * 2^-24.
    assert largest(moved - expected) < 1e-5 * largest(expected) + 1e-6
