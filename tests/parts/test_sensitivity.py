"""Sensitivity of layers: measured as it says, predictions that come true, and lists that for_model takes."""

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.models import tiny
from veloxquant_mlx import CacheInputError, KVCacheBuilder, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.cache.registry import METHODS, method
from veloxquant_mlx.calibrate import Sensitivity, bit_fields, divergences, for_layers, layer_sensitivity, valid_bits
from veloxquant_mlx.calibrate.sensitivity import _kl
from veloxquant_mlx.calibrate.widths import OWN_FIELDS

TOKENS: Any = tiny.tokens(160)[0].tolist()
KIVI = KVCacheConfig(method="kivi", residual_length=32)


@pytest.fixture(scope="module")
def model():
    return tiny.build("llama")


@pytest.fixture(scope="module")
def measured(model) -> Sensitivity:
    told = []
    found = layer_sensitivity(model, TOKENS, KIVI, choices=(2, 3, 4), progress=lambda *a: told.append(a))
    assert told[-1] == (3 * 160, 3 * 160)
    assert [a for a, _ in told] == sorted(a for a, _ in told)
    return found


def test_divergence_is_the_kl_of_the_model_with_one_layer_compressed(model, measured):
    """Against a plain float64 computation of one pass, fed in the same chunks; float32 logits around 1."""
    half, ids = 80, mx.array([TOKENS])
    caches = make_prompt_cache(model)
    caches[1] = KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi", residual_length=32, bit_width_inlier=2))[1]
    model(ids[:, :half], cache=caches)
    rows = [model(ids[:, a : min(a + 32, 160)], cache=caches)[0] for a in range(half, 160, 32)]
    p, q = (np.array(x, dtype=np.float64) for x in (model(ids)[0, half:], mx.concatenate(rows)))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    want = (np.exp(p) * (p - q)).sum(-1).mean()
    assert measured.divergence[1] == pytest.approx(want, rel=1e-3)


def test_errors_fall_with_bits_as_the_quantiser_promises(measured):
    """Min/max levels: a factor of 5.4 from 2 to 3 bits, 4.6 from 3 to 4; attention mixes, so a wide margin."""
    for curve in measured.errors:
        assert 3 < curve[2] / curve[3] < 9
        assert 3 < curve[3] / curve[4] < 9


def test_predictions_come_true(model, measured):
    lists = [[2, 2], [3, 3], [4, 4], [2, 4], [4, 2]]
    found = divergences(model, TOKENS, KIVI, lists)
    for bits, kl in zip(lists, found, strict=True):
        assert measured.predict(bits) == pytest.approx(kl, rel=0.5)  # layers interact; the list spans a factor of 20
    assert np.argmin([measured.predict([2, 4]), measured.predict([4, 2])]) == np.argmin(found[3:])
    assert divergences(model, TOKENS, KIVI, [2]) == found[:1]  # a single int is the uniform list


def test_allocation_takes_from_the_quiet_and_gives_to_the_loud():
    curve = {2: 5.0, 3: 1.0, 4: 0.2}
    sevenfold = {b: 7 * e for b, e in curve.items()}
    samples = tuple(np.array(kl) for kl in ([0.0, 2e-4], [1e-2, 1e-2], [1e-4, 1e-4]))
    made = Sensitivity((1, 3, 5), (0, 1, 2, 3, 5), 3, samples, (curve, curve, sevenfold))
    assert made.curves == [pytest.approx(curve)] * 3
    bits = made.allocate(3)
    assert bits in ([2, 4, 3], [3, 4, 2])
    assert made.blind(3) == [3, 3, 3]
    assert made.predict(bits) == pytest.approx(1e-2 * 0.2 + 1e-4 * (5 + 1))
    assert made.predict(bits) < made.predict(made.blind(3))
    assert made.divergence == [1e-4, 1e-2, 1e-4]
    # By hand, per prediction: layer 3 saves 1e-2 * 0.8; the first layer loses KL * 4 where it is the quiet one.
    saved = np.array([8e-3, 8e-3]) - 4 * samples[0 if bits[0] == 2 else 2]
    gain, error = made.gain(bits, [3, 3, 3])
    assert gain == pytest.approx(saved.mean())
    assert error == pytest.approx(saved.std() / 2**0.5)
    assert gain == pytest.approx(made.predict([3, 3, 3]) - made.predict(bits))
    assert made.full(bits) == [2, bits[0], 2, bits[1], bits[2]]  # entries 0 and 2 keep the model's own cache


@pytest.mark.parametrize("method", ["kivi", "turboquant_rvq"])
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_lists_fit_models_with_other_kinds_of_layers(name, method):
    """Two layers of four are compressed, each with its element of the list."""
    model = tiny.build(name)
    extra: dict[str, Any] = {"residual_length": 32} if method == "kivi" else {}
    found = layer_sensitivity(model, TOKENS[:96], KVCacheConfig(method=method, **extra), choices=(2, 3, 4))
    bits = found.allocate(3)
    config = KVCacheConfig(method=method, bit_width_inlier=found.full(bits), **extra)
    caches = KVCacheBuilder.for_model(model, config)
    assert [caches[i].config.bit_width_inlier for i in found.indices] == bits
    assert sum(bits) == 3 * len(found.indices)


def test_refusals(model):
    with pytest.raises(QuantizerConfigError, match="method='snapkv'.*reads bit_width_inlier, or one of"):
        layer_sensitivity(model, TOKENS, KVCacheConfig(method="snapkv"))
    with pytest.raises(QuantizerConfigError, match="probe=5"):
        layer_sensitivity(model, TOKENS, KIVI, choices=(2, 3), probe=5)
    with pytest.raises(QuantizerConfigError, match="bit_width_inlier=7"):
        layer_sensitivity(model, TOKENS, KIVI, choices=(2, 7))
    with pytest.raises(CacheInputError, match="compressed nothing of 60 tokens"):
        layer_sensitivity(model, TOKENS[:60], KVCacheConfig(method="kivi"))
    with pytest.raises(CacheInputError, match="1 tokens are too few"):
        divergences(model, TOKENS[:1], KIVI, [2])


def test_small_divergences_do_not_drown_in_float32():
    """Logits moved by 1e-4: KL about 5e-9, below float32's resolution of the usual sum; float64 as the truth."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 500))
    y = x + 1e-4 * rng.standard_normal(x.shape)
    y[3] = 40 * rng.standard_normal(500)  # and large ones
    p, q = (a - np.log(np.exp(a).sum(-1, keepdims=True)) for a in (x, y))
    want = (np.exp(p) * (p - q)).sum(-1)
    got = np.array(_kl(mx.array(p.astype(np.float32)), mx.array(q.astype(np.float32))))
    assert np.allclose(got, want, rtol=2e-2)  # log-probabilities of -7 are rounded to 5e-7 in float32
    assert (got > 0).all()


LISTED = sorted(name for name in METHODS if "bit_width_inlier" in method(name).info.reads and name != "vecinfer")


@pytest.mark.parametrize("name", [*LISTED, *OWN_FIELDS])
def test_every_width_is_a_field_that_says_what_it_takes(name):
    assert valid_bits(name).accepts(2)
    assert not valid_bits(name).accepts(9)
    fields = {f.name: f.default for f in dataclasses.fields(KVCacheConfig)}
    assert set(bit_fields(name)) <= set(fields)


@pytest.mark.parametrize("name", [*LISTED, *OWN_FIELDS])
def test_a_list_gives_every_layer_its_bits(model, name):
    """Layer i of the mixed list holds what layer i of the uniform list of its bits holds, and neither the other's."""
    config = KVCacheConfig(method=name)

    def held(bits) -> list[int]:
        caches = for_layers(model, config, bits)
        model(mx.array([TOKENS * 4]), cache=caches)
        for cache in caches:
            cache.end_prefill()
        mx.eval([cache.state for cache in caches])
        return [cache.nbytes for cache in caches]

    few, more = (1, 2) if name == "nsnquant" else (2, 4)  # 3 bits of 16 channels fill no whole words
    low, high = held(few), held(more)
    assert held([few, more]) == [low[0], high[1]]
    assert low[0] < high[0]
    with pytest.raises(QuantizerConfigError, match="attention layers"):
        for_layers(model, config, [2])


@pytest.mark.parametrize("name", ["snapkv", "vecinfer", "kitty"])
def test_methods_without_one_width_are_refused(name):
    with pytest.raises(QuantizerConfigError, match=f"method='{name}'"):
        bit_fields(name)
