"""KVTC: bits by dynamic programming, codes on principal axes, entropy coding at rest, axes from an artifact."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.matrix import feed, identical, same_state, split, stored_bytes, tensors
from tests.models import tiny
from veloxquant_mlx import (
    CacheStateError,
    KVCacheBuilder,
    KVCacheConfig,
    KVCacheFactory,
    QuantizerConfigError,
    cache_report,
)
from veloxquant_mlx.artifacts import CalibrationArtifact
from veloxquant_mlx.attention import reference
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.calibrate import fit_artifact
from veloxquant_mlx.codecs import entropy
from veloxquant_mlx.codecs.allocation import MOST_BITS, best_bits, normal_errors
from veloxquant_mlx.codecs.basis import MOST_ROWS, principal_axes, sampled
from veloxquant_mlx.codecs.levels import lloyd_max
from veloxquant_mlx.codecs.principal import PrincipalLevels, TransformLevels
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.models.rope import UnknownRotation, probe_rotation

CHOICES = (0, 1, 2, 3, 4, 6, 8)
RNG = np.random.default_rng


def rows(shape: tuple[int, ...], scale: Any = 1.0, seed: int = 0) -> mx.array:
    return mx.array((RNG(seed).normal(size=shape) * scale).astype(np.float32))


def fitted(codec: PrincipalLevels, x: mx.array) -> PrincipalLevels:
    return codec.bind(codec.fit(x))


def relative(codec: Any, x: mx.array) -> float:
    return float(np.array(mx.square(codec.decode(codec.encode(x)) - x).sum() / mx.square(x).sum()))


def of_budget(budget: int, choices: tuple[int, ...] = CHOICES, dim: int = 128, **more: Any) -> TransformLevels:
    return TransformLevels(dim, lambda errors: best_bits(errors, choices, budget - 16, 8), choices, **more)


def cache(
    shape: tuple[int, int, int, int] = (1, 2, 64, 64), rope: Any = None, layer: int = 0, **fields: Any
) -> CompressedKVCache:
    config = KVCacheConfig(**{"method": "kvtc", "residual_length": 32, "kvtc_bit_budget": 256, **fields})
    return CompressedKVCache(
        config, LayerInfo(head_dim=shape[2], value_dim=shape[3], kv_heads=shape[1], rope=rope, index=layer)
    )


# --------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize(
    "variances, budget, bits, error",
    [
        ((64, 16, 4, 1), 8, (4, 3, 1, 0), 3.614),
        ((64, 16, 4, 1), 6, (3, 2, 1, 0), 6.544),
        ((100, 10, 1, 0.1, 0.01, 0.001), 12, (6, 4, 2, 0, 0, 0), 0.3879),
        ((1,) * 8, 16, (2,) * 8, 8 * 0.117482),
        ([2.0**-i for i in range(16)], 32, (6, 6, 4, 4, 4, 3, 2, 2, 1) + (0,) * 7, 0.01425),
    ],
)
def test_golden_bits(variances: Any, budget: int, bits: tuple[int, ...], error: float) -> None:
    errors = normal_errors(np.array(variances, np.float64))
    found = best_bits(errors, CHOICES, budget)
    assert tuple(found) == bits
    assert errors[range(len(bits)), found].sum() == pytest.approx(error, rel=3e-4)  # four digits are given
    if len(bits) == 16:
        assert errors[:, 2].sum() == pytest.approx(0.235, abs=5e-4)


def greedy(errors: np.ndarray, budget: int) -> float:
    """The next choice of the component that gains most per bit, while one fits."""
    bits = np.zeros(len(errors), int)
    steps = dict(pairwise(CHOICES))
    while True:
        gains = [
            ((errors[i, b] - errors[i, steps[b]]) / (steps[b] - b), i)
            for i, b in enumerate(bits)
            if b in steps and bits.sum() - b + steps[b] <= budget
        ]
        if not gains:
            return errors[range(len(bits)), bits].sum()
        i = max(gains)[1]
        bits[i] = steps[bits[i]]


@pytest.mark.parametrize("unit", [1, 8])
def test_never_worse_than_greedy_and_within_the_budget(unit: int) -> None:
    for seed in range(12):
        variances = np.sort(RNG(seed).lognormal(0, 2, 16))[::-1]
        errors, budget = normal_errors(variances), 8 * (2 + seed)
        bits = best_bits(errors, CHOICES, budget, unit)
        assert (np.diff(bits.astype(int)) <= 0).all() and set(bits.tolist()) <= set(CHOICES)
        assert sum(-(-int((bits == b).sum()) * b // unit) * unit for b in CHOICES) <= budget
        if unit == 1:
            assert errors[range(16), bits].sum() <= greedy(errors, budget) + 1e-9


def test_too_small_a_budget_for_the_choices() -> None:
    with pytest.raises(ValueError, match="too few"):
        best_bits(normal_errors(np.ones(8)), (2, 4), 15)


# -------------------------------------------------------------------------------------------------------------- axes


def test_axes() -> None:
    x = rows((2, 3, 200, 40), RNG(1).uniform(0.1, 5, (2, 3, 1, 40)))
    axes, energy = principal_axes(x)
    assert mx.abs(axes.swapaxes(-1, -2) @ axes - mx.eye(40)).max() < 1e-5  # float32 LAPACK
    singular = np.linalg.svd(np.array(x, np.float64), compute_uv=False)
    assert np.allclose(np.sqrt(np.array(energy)), singular, rtol=1e-3)
    peaks = mx.take_along_axis(axes, mx.argmax(mx.abs(axes), axis=-2, keepdims=True), axis=-2)
    assert mx.all(peaks > 0) and mx.all(mx.square(x @ axes).sum(2)[..., :-1] >= energy[..., 1:] * (1 - 1e-3))
    assert principal_axes(x * float("nan"))[0].shape == axes.shape  # comes back
    assert sampled(rows((1, 1, MOST_ROWS + 1, 2))).shape[2] <= MOST_ROWS


@pytest.mark.parametrize(
    "budget, figures", [(512, (0.0110, 0.0069, 0.0034)), (256, (0.126, 0.075, 0.032))], ids=["4 bits", "2 bits"]
)
def test_power_law_spectra(budget: int, figures: tuple[float, ...]) -> None:
    """The specification's figures, rows with sizes of their own; fitted on the same rows, which are few, it is less."""
    for exponent, figure in zip((0.5, 1.0, 1.5), figures, strict=True):
        scale = np.arange(1, 129.0) ** (-exponent / 2) * np.exp(0.4 * RNG(2).normal(size=(1, 1, 1024, 1)))
        x = rows((1, 1, 1024, 128), scale)
        assert 0.6 * figure < relative(fitted(of_budget(budget), x), x) < 1.02 * figure


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_eight_bits_everywhere(dim: int) -> None:
    x = rows((1, 2, 512, dim)) + 3 * rows((1, 2, 1, dim), seed=1)
    assert relative(fitted(of_budget(8 * dim + 16, (8,), dim), x), x) < 1e-4


def test_measured_errors_and_the_model_where_there_are_too_few_rows() -> None:
    x = rows((1, 2, 256, 64), np.linspace(3, 0.1, 64))
    measured, model, other = (
        of_budget(144, dim=64, least=n, beta=b).learn(x) for n, b in ((256, 9), (257, 9), (257, 2))
    )
    power = np.square(np.array(measured["spread"])).mean((0, 1))
    errors = np.array(measured["errors"])
    assert np.allclose(errors[:, 0], power, rtol=1e-5)
    centred = np.array(x - x.mean(axis=2, keepdims=True), np.float64)
    y = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True)) @ np.array(measured["basis"], np.float64)
    spread = np.array(measured["spread"], np.float64)[:, :, None]
    for bits in (1, 2, 4, 8):
        levels = lloyd_max(bits) * spread[..., None]
        nearest = np.abs(y[..., None] - levels).min(-1)
        assert np.allclose(errors[:, bits], np.square(nearest).mean((0, 1, 2)), rtol=1e-2)  # borders may round
    assert np.allclose(np.array(model["errors"]), power[:, None] * 9.0 ** -np.arange(MOST_BITS + 1), rtol=1e-4)
    assert not mx.allclose(model["errors"], other["errors"])


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_products_are_those_of_decoded_rows(dim: int) -> None:
    """Mean, dropped axes and every width in one row; within float32 sums in another order."""
    x = rows((2, 2, 300, dim), np.linspace(4, 0.05, dim)) + rows((2, 2, 1, dim), seed=1)
    codec = fitted(of_budget(200, dim=dim), x)
    assert len({int(b) for b in np.array(codec._fitted["bits"][0, 0])}) > 3
    codes, q, p = codec.encode(x), rows((2, 2, 5, dim), seed=2), mx.softmax(rows((2, 2, 5, 300), seed=3), axis=-1)
    y = codec.decode(codes)
    assert mx.allclose(codec.scores(q, codes), q @ y.swapaxes(-1, -2), rtol=1e-4, atol=1e-3)
    assert mx.allclose(codec.mix(p, codes), p @ y, rtol=1e-4, atol=1e-4)
    taken = codec.take(codes, mx.array([[[7, 3], [0, 299]], [[1, 2], [5, 5]]]))
    assert taken is not None and mx.allclose(codec.decode(taken)[0, 1, 1], y[0, 1, 299], rtol=1e-5, atol=1e-5)
    size = codes["rms"].itemsize + sum(a.shape[-1] for name, a in codes.items() if name != "rms")
    assert 190 // 8 <= size <= 200 // 8


@pytest.mark.parametrize("kind", ["zeros", "constant", "one huge channel", "large", "few rows"])
def test_edges(kind: str) -> None:
    x = {
        "zeros": mx.zeros((1, 1, 64, 32)),
        "constant": mx.full((1, 1, 64, 32), 3.0),
        "one huge channel": rows((1, 1, 64, 32), np.where(np.arange(32) == 5, 1000.0, 1.0)),
        "large": mx.clip(rows((1, 1, 64, 32)), -3, 3) * 2e4,
        "few rows": rows((1, 1, 2, 32)),
    }[kind]
    y = (codec := fitted(of_budget(144, dim=32), x)).decode(codec.encode(x), mx.float16)
    assert mx.isfinite(y).all()
    if kind in ("zeros", "constant"):
        assert mx.allclose(y.astype(mx.float32), x, atol=1e-2)
    big = codec.encode(3 * (x - codec._fitted["mean"]) + codec._fitted["mean"])
    same = [mx.array_equal(a, big[name]) for name, a in codec.encode(x).items() if name != "rms"]
    if kind in ("zeros", "constant"):
        assert all(same)


def test_scale_equivariance() -> None:
    """A row twice as far from the mean has the same codes and twice the size."""
    x = rows((1, 2, 100, 64))
    codec = fitted(of_budget(256, dim=64), x)
    mean = codec._fitted["mean"]
    one, two = codec.encode(x), codec.encode(mean + 2 * (x - mean))
    assert mx.allclose(two["rms"], 2 * one["rms"], rtol=2e-3)
    assert all(np.mean(np.array(one[n] == two[n])) > 0.999 for n in one if n != "rms")  # borders may round


# ------------------------------------------------------------------------------------------------------------- caches


def test_sinks_and_the_newest_are_exact() -> None:
    c, data = cache(), tensors(300)
    feed(c, data, [299, 1])
    keys, values = c.materialize()
    for got, want in ((keys, data.k), (values, data.v)):
        same = mx.all(got == want, axis=(0, 1, 3))
        first, last = 4, 300 - 32 - (300 - 36) % 32
        assert same[:first].all() and same[last:].all() and not same[first:last].any()


def test_fitted_on_the_whole_prompt_however_it_came() -> None:
    data = tensors(301)
    whole, pieces = cache(), cache()
    feed(whole, data, [300, 1])
    feed(pieces, data, [*split(300, 77), 1])
    assert same_state(whole, pieces)
    more = tensors(40, seed=3)
    feed(whole, more, [1] * 40)
    assert whole._store.keys.packed is not None and whole._store.keys.packed.n == (341 - 36) // 32 * 32


def test_short_prompts_wait_for_rows_enough() -> None:
    """Exact until 4 rows per channel are there after the sinks; then fitted on those."""
    data, c = tensors(260), cache()
    feed(c, data.part(0, 259), [230, *[1] * 29])
    assert not c._store.sealed and "once it has 256 tokens" in " ".join(c.describe()["notes"])
    feed(c, data.part(259, 260), [1])
    assert c._store.keys.packed is not None and c._store.keys.packed.n == (260 - 36) // 32 * 32
    want = c._store.values.spec.codec.fit(data.v[:, :, 4:])["basis"]  # type: ignore[union-attr]
    assert identical(c._store.values.arrays()["fitted.basis"], want)


def test_keys_are_stored_before_their_rotation() -> None:
    """Keys that differ by their position alone are one direction then; after RoPE they are many."""
    rope = probe_rotation(nn.RoPE(64), 64)
    base = rows((1, 2, 1, 64)) + 0.05 * rows((1, 2, 300, 64), seed=1)
    data = tensors(300)
    turned = type(data)(data.q, rope.turn(base, mx.arange(300)[None, None]), data.v)
    errors = []
    for known in (rope, None):
        c = cache(rope=known, kvtc_bit_budget=96)
        out = feed(c, turned, [299, 1])
        keys, values = c.materialize()
        errors.append(mx.square(keys - turned.k).mean().item())
        want = reference.attention(data.q[:, :, -1:], keys, values, 0.125, None)
        assert mx.allclose(c.attend(data.q[:, :, -1:], scale=0.125), want, rtol=1e-4, atol=1e-4) and out.shape[2] == 300
    assert errors[0] < 0.1 * errors[1]
    blind = cache(rope=UnknownRotation("odd"))
    assert "after their rotary positions" in blind.describe()["notes"][0]


def test_every_head_and_sequence_has_its_own_axes() -> None:
    both, data = cache((2, 2, 64, 64)), tensors(300, (2, 2, 64, 64))
    feed(both, data, [299, 1])
    basis = both._store.values.arrays()["fitted.basis"]
    assert not mx.allclose(basis[0, 0], basis[0, 1]) and not mx.allclose(basis[0, 0], basis[1, 0])


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"kvtc_bit_budget": 16}, "kvtc_bit_budget=16"),
        ({"kvtc_bit_budget": 0}, "kvtc_bit_budget=0"),
        ({"kvtc_bit_budget": 200, "kvtc_bit_choices": (2, 4)}, "an int >= 272"),
        ({"kvtc_bit_choices": ()}, "kvtc_bit_choices"),
        ({"kvtc_bit_choices": (0,)}, "above 0"),
        ({"kvtc_bit_choices": (4, 2)}, "ascending"),
        ({"kvtc_bit_choices": (2, 2)}, "ascending"),
        ({"kvtc_bit_choices": (9,)}, "kvtc_bit_choices"),
        ({"kvtc_beta": 1.0}, "kvtc_beta"),
    ],
)
def test_refusals(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(QuantizerConfigError, match=words):
        KVCacheFactory.create(KVCacheConfig(**{"method": "kvtc", **fields}))


# ------------------------------------------------------------------------------------------------------------ at rest


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("count", [1, 5, 33])
def test_rows_of_bytes_come_back_from_the_entropy_coder(bits: int, count: int) -> None:
    codec = fitted(TransformLevels(count, lambda e: np.full(count, bits, np.uint8), (bits,)), rows((1, 2, 70, count)))
    words = mx.pad(codec.encode(rows((1, 2, 70, count)))[f"w{bits}"], [(0, 0), (0, 0), (0, 58), (0, 0)])
    assert words.shape[-1] == -(-count * bits // 8)
    assert identical(entropy.decode_words(entropy.encode_words(words, bits), bits, words.shape, 1), words)


def test_entropy_of_lloyd_max_codes() -> None:
    """Codes of 2 bits have 1.91 bits of entropy, of 4 bits 3.77: 4 to 6 per cent are gained."""
    x = rows((1, 1, 4096, 64))
    for bits, held in ((2, 1.9111), (4, 3.7657)):
        codec = fitted(TransformLevels(64, lambda e, b=bits: np.full(64, b, np.uint8), (bits,)), x)
        words = codec.encode(x)[f"w{bits}"]
        rate = 8 * entropy.encode_words(words, bits, per_channel=False).nbytes / x.size
        assert held - 0.01 < rate < held + 0.03


def test_the_receipt_tells_both_numbers() -> None:
    c = cache((1, 2, 128, 128), n_calib_tokens=64, kvtc_bit_choices=(0, 2, 4))
    feed(c, tensors(1000, (1, 2, 128, 128)), [999, 1])
    rest = cache_report([c], at_rest=True).at_rest
    assert rest is not None and rest.entropy < rest.coded and rest.nbytes < c.nbytes
    held = sum(a.nbytes for name, a in c.arrays().items() if ".w" in name)
    assert rest.coded < 0.99 * held


# ---------------------------------------------------------------------------------------------------------- artifacts

MODEL = tiny.build("llama")
TOKENS: Any = tiny.tokens(400)[0].tolist()


@pytest.fixture(scope="module")
def artifact() -> tuple[CalibrationArtifact, list[str]]:
    return fit_artifact(MODEL, [TOKENS[:200], TOKENS[200:]], "kvtc", limit=300)


def test_axes_of_an_artifact_are_used_at_once(artifact: tuple[CalibrationArtifact, list[str]], tmp_path: Any) -> None:
    made, told = artifact
    made.save(tmp_path / "axes")
    loaded = CalibrationArtifact.load(tmp_path / "axes")
    config = KVCacheConfig(method="kvtc", store=loaded, residual_length=32, kvtc_bit_budget=128)
    caches: Any = KVCacheBuilder.for_model(MODEL, config)
    MODEL(tiny.tokens(100), cache=caches)
    c = caches[0]
    mx.eval(c.state)
    assert c._store.keys.packed.n == 64 and "artifact" in " ".join(c.describe()["notes"])  # while the prompt runs
    assert not [name for name in c.arrays() if "fitted" in name] and c.held_bytes()["fixed"] > 4 * 2 * 16 * 16
    plain = KVCacheBuilder.for_model(MODEL, KVCacheConfig(method="kvtc", residual_length=32, kvtc_bit_budget=128))[0]
    assert "fitted on the prompt" in " ".join(plain.describe()["notes"])
    assert any("directions" in line for line in told)
    with pytest.raises(CacheStateError, match="made with store"):
        CompressedKVCache.from_state(c.state)


def test_the_offline_fit_is_the_fit_of_the_same_rows(artifact: tuple[CalibrationArtifact, list[str]]) -> None:
    """Keys before their rotation, tokens of both sequences: decoded rows come near the model's own."""
    fields: dict[str, Any] = {"residual_length": 0, "kvtc_bit_budget": 144, "kvtc_bit_choices": (8,)}
    own: Any = KVCacheBuilder.for_model(MODEL, KVCacheConfig(method="kvtc", store=artifact[0], **fields))
    plain = make_prompt_cache(MODEL)
    for caches in (own, plain):
        MODEL(mx.array([TOKENS[:100]]), cache=caches)
    own[0].settle()
    assert own[0]._store.keys.packed.n == 96
    for got, want in zip(own[0].materialize(), (plain[0].keys, plain[0].values), strict=True):
        error = mx.square(got - want[:, :, :100])[:, :, 4:].mean() / mx.square(want[:, :, 4:100]).mean()
        assert 0 < float(np.array(error)) < 2e-4  # Lloyd-Max at 8 bits: 4.2e-5 on rows of the fit


@pytest.mark.parametrize("damage", ["method", "missing", "shape"])
def test_other_artifacts_are_refused(artifact: tuple[CalibrationArtifact, list[str]], damage: str) -> None:
    arrays = artifact[0].layer(0)
    if damage == "missing":
        arrays.pop("k_mean")
    elif damage == "shape":
        arrays["v_basis"] = arrays["v_basis"][:1]
    other = CalibrationArtifact("spectral" if damage == "method" else "kvtc", {0: arrays})
    dim, heads = artifact[0].layer(0)["k_basis"].shape[-1], artifact[0].layer(0)["k_basis"].shape[0]
    with pytest.raises(QuantizerConfigError, match="spectral" if damage == "method" else r"k_mean|v_basis"):
        cache((1, heads, dim, dim), store=other)


def test_bytes_of_a_row() -> None:
    """The whole budget, to the byte, where the choices can use it: 4.0 bits per number with the size of the row."""
    c, data = cache((1, 1, 128, 128), kvtc_bit_budget=512, n_calib_tokens=64), tensors(356, (1, 1, 128, 128))
    feed(c, data, [355, 1])
    before = stored_bytes(c)
    feed(c, tensors(64, (1, 1, 128, 128), seed=4), [1] * 64)
    grown = stored_bytes(c) - before
    assert grown == 64 * 2 * 512 // 8
