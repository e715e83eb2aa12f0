"""for_model: refusals in their order, one cache per slot, a configuration per layer."""

# Wrong types are the subject here.
# pyright: reportArgumentType=false

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.cache.base import STANDALONE_METHODS
from veloxquant_mlx.cache.registry import METHODS
from veloxquant_mlx.core import LayerInfo
from veloxquant_mlx.models import inspect
from veloxquant_mlx.models.inspect import Slot

for_model = KVCacheBuilder.for_model


def tiny(layers: int = 3) -> nn.Module:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=layers,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=32,
    )
    mx.random.seed(0)
    return llama.Model(args)


class Untouchable:
    """A model of which nothing may be read."""

    def __getattribute__(self, name):
        raise AssertionError(f"{name} was read")


@pytest.fixture
def mixed(monkeypatch) -> list[Slot]:
    """Slots of a hybrid: full attention, sliding window, recurrent state, full attention with another head size."""
    slots = [
        Slot(0, KVCache(), LayerInfo(head_dim=64, value_dim=64, index=0, rank=0, n_layers=2), nn.Linear(1, 1)),
        Slot(1, RotatingKVCache(8), None, nn.Linear(1, 1), "sliding window"),
        Slot(2, ArraysCache(2), None, None, "recurrent state"),
        Slot(3, KVCache(), LayerInfo(head_dim=128, value_dim=128, index=3, rank=1, n_layers=2), nn.Linear(1, 1)),
    ]
    monkeypatch.setattr(inspect, "cache_slots", lambda model: slots)
    return slots


@pytest.mark.parametrize("name", sorted(STANDALONE_METHODS))
@pytest.mark.parametrize("bits", [2, [], [2, "x"]])
def test_standalone_methods_are_refused_before_anything_is_read(name, bits):
    with pytest.raises(QuantizerConfigError, match=f"'{name}'.*standalone.*serve_standalone=True"):
        for_model(Untouchable(), KVCacheConfig(method=name, bit_width_inlier=bits))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_serves_a_model(name):
    caches = for_model(tiny(), KVCacheConfig(method=name), serve_standalone=name in STANDALONE_METHODS)
    assert [type(c).__name__ for c in caches] == ["CompressedKVCache"] * 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KVCacheConfig(method="none"), "unknown method 'none'"),
        ([], "a list of 0"),
        ([KVCacheConfig(method="snapkv")] * 3, "a list of 3"),
        ([KVCacheConfig(method="snapkv"), None], "config=None.*KVCacheConfig"),
        ([KVCacheConfig(method="kivi"), KVCacheConfig(method="kivi")], "'kivi' drops none.*snapkv, kivi"),
        ([KVCacheConfig(method="snapkv"), KVCacheConfig(method="snapkv")], "'snapkv' drops tokens itself"),
        (
            [KVCacheConfig(method="snapkv"), KVCacheConfig(method="kivi", capacity=9)],
            "capacity=9 of the second configuration",
        ),
        (None, "config=None.*KVCacheConfig"),
        (KVCacheConfig(method="kivi", bit_width_inlier=[]), "must not be empty"),
        (KVCacheConfig(method="kivi", bit_width_inlier=[2, 0, 2]), "must be an int >= 1.*element 1"),
        (KVCacheConfig(method="kivi", bit_width_inlier=[2, 2]), "2 elements.*3 attention layers"),
        (KVCacheConfig(method="kivi", bit_width_inlier=[2, 7, 2]), "bit_width_inlier=7.*one of"),
        (KVCacheConfig(method="snapkv", bit_width_inlier=[4, 4, 4]), "bit_width_inlier=4.*'snapkv'"),
        (KVCacheConfig(method="kivi", sliding_window=4), "sliding_window=4"),
        (KVCacheConfig(method="kivi", seed="x"), "seed='x'"),
        (KVCacheConfig(method="skvq", bit_width_outlier=3), "bit_width_outlier=3.*two-stream mode"),
    ],
)
def test_refusals(config, message):
    with pytest.raises(QuantizerConfigError, match=message):
        for_model(tiny(), config)


@pytest.mark.parametrize("model", [object(), SimpleNamespace(layers=[])])
def test_a_model_without_layers_is_refused(model):
    with pytest.raises(QuantizerConfigError, match="layers"):
        for_model(model, KVCacheConfig(method="kivi"))


def test_one_configuration_per_layer(mixed):
    config = KVCacheConfig(method="kivi", bit_width_inlier=[2, 3, 4], seed=10)
    caches = for_model(object(), config)
    assert [c.config.bit_width_inlier for c in (caches[0], caches[3])] == [2, 4]  # the sliding layer's 3 is unused
    assert [c.config.seed for c in (caches[0], caches[3])] == [10, 13]
    assert [c.config.head_dim for c in (caches[0], caches[3])] == [64, 128]
    assert caches[1:3] == [mixed[1].native, mixed[2].native]
    assert (config.bit_width_inlier, config.seed, config.head_dim) == ([2, 3, 4], 10, 128)


def test_head_size_rules_use_the_layers_head_size(mixed):
    """200 channels are too many for the layers (64, 128), though not for the head_dim of the configuration."""
    fields = {"method": "turboquant_mse", "bit_width_outlier": 4}
    with pytest.raises(QuantizerConfigError, match=r"n_outlier_channels=200.*head_dim = 64"):
        config = KVCacheConfig(head_dim=256, n_outlier_channels=200, **fields)
        for_model(object(), config, serve_standalone=True)
    assert for_model(object(), KVCacheConfig(head_dim=8, n_outlier_channels=16, **fields), serve_standalone=True)


def test_nothing_to_compress_warns_and_returns_the_models_caches(monkeypatch):
    slot = Slot(0, ArraysCache(2), None, None, "recurrent state")
    monkeypatch.setattr(inspect, "cache_slots", lambda model: [slot])
    with pytest.warns(UserWarning, match="no layer.*recurrent state"):
        assert for_model(object(), KVCacheConfig(method="kivi")) == [slot.native]
    with pytest.raises(QuantizerConfigError, match="residual_length"):
        for_model(object(), KVCacheConfig(method="kivi", residual_length=-1))


def test_a_model_that_hides_its_queries_is_refused_for_methods_that_need_them(monkeypatch):
    slot = Slot(0, KVCache(), LayerInfo(), nn.Linear(1, 1), "", hooked=False)
    monkeypatch.setattr(inspect, "cache_slots", lambda model: [slot])
    with pytest.raises(QuantizerConfigError, match=r"'snapkv' needs the model's queries.*\[0\]"):
        for_model(object(), KVCacheConfig(method="snapkv"))
    assert len(for_model(object(), KVCacheConfig(method="kivi"))) == 1


def test_fresh_caches_on_every_call():
    model, config = tiny(), KVCacheConfig(method="kivi")
    first, second = for_model(model, config), for_model(model, config)
    assert not {id(c) for c in first} & {id(c) for c in second}
