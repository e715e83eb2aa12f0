"""Every refusal names the field, the value, the valid range and a remedy."""

# Wrong types are the subject here.
# pyright: reportArgumentType=false

import dataclasses
import math
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache as ServingCache

from veloxquant_mlx import (
    KernelUnavailableError,
    KVCache,
    KVCacheBuilder,
    KVCacheConfig,
    KVCacheFactory,
    QuantizerConfigError,
)
from veloxquant_mlx.cache.base import STANDALONE_METHODS
from veloxquant_mlx.cache.options import SnapKVOptions
from veloxquant_mlx.cache.registry import METHODS, method
from veloxquant_mlx.observers import EventLog

# (fields, fragments of the message), in the documented order of the checks.
BUILD = [
    ({"head_dim": 96}, ["head_dim=96", "power of 2"]),
    ({"head_dim": 0}, ["head_dim=0", "power of 2"]),
    ({"head_dim": 64.0}, ["head_dim=64.0", "power of 2"]),
    ({"head_dim": None}, ["head_dim=None", "power of 2"]),
    ({"bit_width_inlier": []}, ["bit_width_inlier list must not be empty"]),
    ({"bit_width_inlier": [2, 0]}, ["every element of bit_width_inlier must be an int >= 1", "element 1 is 0"]),
    ({"bit_width_inlier": [2, True]}, ["every element of bit_width_inlier must be an int >= 1"]),
    ({"bit_width_inlier": 0}, ["bit_width_inlier=0", ">= 1"]),
    ({"bit_width_inlier": 2.5}, ["bit_width_inlier=2.5", ">= 1"]),
    ({"jl_dim": 256}, ["jl_dim=256", "<= head_dim"]),
    ({"n_outlier_channels": 128}, ["n_outlier_channels=128", "< head_dim"]),
    ({"n_calib_tokens": 0}, ["n_calib_tokens=0", ">= 1"]),
    ({"bit_width_inlier": [2, 3]}, ["single int", "for_model"]),  # create's own first rule
]


@pytest.mark.parametrize(("fields", "fragments"), BUILD)
def test_build_refuses(fields, fragments):
    builder = KVCacheBuilder()._with(**fields)
    with pytest.raises(QuantizerConfigError) as error:
        builder.build()
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)


@pytest.mark.parametrize("i", range(len(BUILD) - 2))
def test_build_checks_in_the_documented_order(i):
    fields = {**BUILD[i + 1][0], **BUILD[i][0]}
    with pytest.raises(QuantizerConfigError) as error:
        KVCacheBuilder()._with(**fields).build()
    assert BUILD[i][1][0] in str(error.value)


CREATE = [
    ({"method": "kivi", "bit_width_inlier": [2]}, ["bit_width_inlier=[2]", "single int", "for_model"]),
    ({"method": "gear", "bit_width_outlier": 4}, ["bit_width_outlier=4", "None", "two-stream"]),
    ({"method": "kivi", "sliding_window": 8}, ["sliding_window=8", "None", "streaming_llm"]),
    ({"method": "kivi", "observers": [print]}, ["observers=", "on_event"]),
    ({"method": "kivi", "options": {"kivi_group_size": 2}}, ["options=", "veloxquant_mlx.cache.options"]),
    ({"method": "kivi", "store": "a path"}, ["store='a path'", "ArtifactStore"]),
    ({"method": "kivi", "dtype": mx.int32}, ["dtype=", "mx.float16"]),
    ({"method": "kivi", "dtype": "float16"}, ["dtype='float16'", "mx.float16"]),
    ({"method": "kivi", "seed": -1}, ["seed=-1", ">= 0"]),
    ({"method": "kivi", "seed": True}, ["seed=True", "int"]),
    ({"method": "kivi", "capacity": 0}, ["capacity=0", ">= 1"]),
    ({"method": "kivi", "head_dim": 0}, ["head_dim=0", ">= 1"]),
    ({"method": "kivi", "jl_dim": 64}, ["jl_dim=64", "None for method 'kivi'"]),
    ({"method": "kivi", "n_sink_tokens": 4}, ["n_sink_tokens=4", "5 for method 'kivi'"]),
    ({"method": "snapkv", "residual_length": 64}, ["residual_length=64", "128 for method 'snapkv'"]),
    ({"method": "snapkv", "bit_width_inlier": 4}, ["bit_width_inlier=4", "2 for method 'snapkv'"]),
    ({"method": "svdq", "key_codebook": mx.zeros((2, 2))}, ["key_codebook=", "None for method 'svdq'"]),
    # kivi
    ({"method": "kivi", "bit_width_inlier": 7}, ["bit_width_inlier=7", "1, 2, 3, 4, 5, 6, 8"]),
    ({"method": "kivi", "kivi_group_size": 1}, ["kivi_group_size=1", ">= 2", "32"]),
    ({"method": "kivi", "residual_length": -1}, ["residual_length=-1", ">= 0"]),
    ({"method": "kivi", "residual_length": 48}, ["residual_length=48", "multiple of 32", "kivi_group_size = 32"]),
    # turboquant_rvq
    ({"method": "turboquant_rvq", "bit_width_inlier": 5}, ["bit_width_inlier=5", "1..4"]),
    ({"method": "turboquant_rvq", "jl_dim": 64}, ["jl_dim=64", "None"]),
    # snapkv
    ({"method": "snapkv", "snap_budget": 0}, ["snap_budget=0", ">= 1"]),
    ({"method": "snapkv", "snap_obs_window": 0}, ["snap_obs_window=0", ">= 1"]),
    ({"method": "snapkv", "snap_n_sink": -1}, ["snap_n_sink=-1", ">= 0"]),
    ({"method": "snapkv", "snap_budget": 36}, ["snap_budget=36", "snap_n_sink=4 + snap_obs_window=32", "> 36"]),
    ({"method": "snapkv", "snap_dtype": "int8"}, ["snap_dtype='int8'", "'auto', 'float16'"]),
    ({"method": "snapkv", "snap_backend": "metal"}, ["snap_backend='metal'", "'reference'", "no Metal kernel"]),
    ({"method": "snapkv", "snap_backend": "cuda"}, ["snap_backend='cuda'", "'metal'"]),
    ({"method": "snapkv", "snap_batched_scoring": 1}, ["snap_batched_scoring=1", "True or False"]),
    ({"method": "snapkv", "capacity": 100}, ["capacity=100", "snap_budget = 512"]),
    # streaming_llm
    ({"method": "streaming_llm", "stream_n_sink": -1}, ["stream_n_sink=-1", ">= 0"]),
    ({"method": "streaming_llm", "stream_window_size": 0}, ["stream_window_size=0", ">= 1"]),
    ({"method": "streaming_llm", "capacity": 600}, ["capacity=600", "516", "bounded already"]),
    # rules between fields of the other methods
    ({"method": "h2o", "h2o_grace": 508}, ["h2o_budget=512", "h2o_grace=508"]),
    ({"method": "h2o", "h2o_decay": 0.0}, ["h2o_decay=0.0", "(0, 1]"]),
    ({"method": "h2o", "h2o_decay": math.nan}, ["h2o_decay=nan", "(0, 1]"]),
    ({"method": "tova", "tova_n_sink": 511}, ["tova_budget=512", "> 512"]),
    ({"method": "pyramidkv", "pyramid_backend": "none"}, ["pyramid_backend='none'"]),
    ({"method": "pyramidkv", "pyramid_resolved_budget": 36}, ["pyramid_resolved_budget=36", "> 36"]),
    ({"method": "squeeze", "squeeze_budget": 16}, ["squeeze_budget=16", "5"]),
    ({"method": "chunkkv", "chunkkv_budget": 43}, ["chunkkv_budget=43", "> 43"]),
    ({"method": "cam", "cam_merge": "max"}, ["cam_merge='max'", "'mean'"]),
    ({"method": "knorm", "knorm_keep": "middle"}, ["knorm_keep='middle'", "'low', 'high'"]),
    ({"method": "knorm", "knorm_recent": 508}, ["knorm_budget=512", "knorm_recent=508"]),
    ({"method": "qfilters", "qfilters_sign": 0}, ["qfilters_sign=0", "1, -1"]),
    ({"method": "qfilters", "qfilters_on_low_retention": "log"}, ["qfilters_on_low_retention='log'", "'raise'"]),
    ({"method": "keyformer", "keyformer_tau_init": 0.0}, ["keyformer_tau_init=0.0", "keyformer_tau_end"]),
    ({"method": "morphkv", "morphkv_n_sink": 512}, ["morphkv_budget=512"]),
    ({"method": "kvzip", "kvzip_probe": "all"}, ["kvzip_probe='all'", "'context', 'latest'"]),
    ({"method": "nestedkv", "nestedkv_n_sink": 512}, ["nestedkv_budget=512"]),
    ({"method": "rocketkv", "rocketkv_compression_ratio": 1.0}, ["rocketkv_compression_ratio=1.0", "(1, inf)"]),
    ({"method": "rocketkv", "rocketkv_head_topk1": 129}, ["rocketkv_head_topk1=129", "head_dim = 128"]),
    ({"method": "kitty", "kitty_lo_bit": 5}, ["kitty_hi_bit=4", "kitty_lo_bit"]),
    ({"method": "adakv", "adakv_target_avg_bits": 4.5}, ["adakv_target_avg_bits=4.5", "[2, 4]"]),
    ({"method": "adakv", "adakv_importance": "norm"}, ["adakv_importance='norm'", "'attention_entropy'"]),
    ({"method": "kvtc", "kvtc_bit_choices": ()}, ["kvtc_bit_choices=()", "non-empty"]),
    ({"method": "kvtc", "kvtc_bit_choices": (2, 1)}, ["kvtc_bit_choices=(2, 1)", "ascending", "(1, 2)"]),
    ({"method": "kvtc", "kvtc_bit_choices": (0,)}, ["kvtc_bit_choices=(0,)", "above 0"]),
    ({"method": "kvtc", "kvtc_bit_choices": (5, 6)}, ["kvtc_bit_budget=512", "640"]),
    ({"method": "svdq", "svdq_rank": 129}, ["svdq_rank=129", "8..128"]),
    ({"method": "palu", "palu_lo_bit": 8}, ["palu_lo_bit=8", "palu_hi_bit = 4"]),
    ({"method": "gear", "gear_rank": 200}, ["gear_rank=200", "head_dim = 128"]),
    ({"method": "zipcache", "zipcache_lo_bits": 8}, ["zipcache_lo_bits=8", "zipcache_hi_bits = 4"]),
    ({"method": "amc", "amc_k_high": 0.8}, ["amc_k_mid=0.3", "amc_k_high"]),
    ({"method": "amc", "amc_adaptive_thresholds": True}, ["amc_calib_variance=None", "> 0"]),
    ({"method": "a2ats", "a2ats_beta": 1.5}, ["a2ats_beta=1.5", "[0, 1]"]),
    ({"method": "a2ats", "a2ats_codebook": mx.zeros((4, 4))}, ["a2ats_codebook", "(4, 4)", "8"]),
    ({"method": "age_tiered", "age_mid_boundary": 64}, ["age_mid_boundary=64", "age_recent_boundary = 128"]),
    ({"method": "vecinfer", "head_dim": 100, "value_sub_dim": 8}, ["value_sub_dim=8", "head_dim = 100"]),
    ({"method": "vecinfer", "key_codebook": mx.zeros((8, 4))}, ["key_codebook", "(8, 4)", "(4096, 4)"]),
    ({"method": "turboquant_mse", "jl_dim": 64}, ["jl_dim=64", "None for method 'turboquant_mse'"]),
    ({"method": "turboquant_rvq", "bit_width_outlier": 5}, ["bit_width_outlier=5", "1..4"]),
    ({"method": "turboquant_mse", "bit_width_inlier": 9}, ["bit_width_inlier=9", "1, 2, 3, 4, 5, 6, 8"]),
    ({"method": "turboquant_mse", "n_outlier_channels": 8}, ["n_outlier_channels=8", "bit_width_outlier"]),
    ({"method": "qjl", "n_outlier_channels": 128}, ["n_outlier_channels=128", "< head_dim = 128"]),
    ({"method": "polar", "head_dim": 33}, ["head_dim=33", "even"]),
    ({"method": "spectral", "spectral_key_d_eff": 129}, ["spectral_key_d_eff=129", "head_dim = 128"]),
    ({"method": "qjl", "sliding_window": 0}, ["sliding_window=0", ">= 1"]),
]


@pytest.mark.parametrize(("fields", "fragments"), CREATE)
def test_create_refuses(fields, fragments):
    with pytest.raises(QuantizerConfigError) as error:
        KVCacheFactory.create(KVCacheConfig(**fields))
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)


@pytest.mark.parametrize("name", ["quant", None, 3, ["kivi"]])
def test_unknown_method(name):
    with pytest.raises(QuantizerConfigError) as error:
        KVCacheFactory.create(KVCacheConfig(method=name))
    assert "unknown method" in str(error.value)
    assert repr(name) in str(error.value)
    assert str(error.value).endswith(f"Choices: {', '.join(METHODS)}.")


@pytest.mark.parametrize("field", ["use_metal_kernels", "fused_sdpa", "fused_sdpa_memory_bound"])
def test_a_kernel_that_does_not_exist_is_refused(field):
    with pytest.raises(KernelUnavailableError, match=f"{field}=True.*no kernel.*default"):
        KVCacheFactory.create(KVCacheConfig(method="kivi", **{field: True}))


WRONG = [None, "2", 2.5, True, -1, 10**6, math.inf, [2], (), object()]


@pytest.mark.parametrize("name", METHODS)
def test_every_option_refuses_what_is_out_of_its_range(name):
    """Whatever a field's range does not accept is refused by check, with field, value and range in the message."""
    entry = method(name)
    for f in dataclasses.fields(entry.info.options) if entry.info.options else ():
        valid = f.metadata["valid"]
        refused = [value for value in WRONG if not valid.accepts(value)]
        assert refused, f.name
        for value in refused:
            with pytest.raises(QuantizerConfigError) as error:
                entry.check(KVCacheConfig(method=name, **{f.name: value}))
            assert f"{f.name}={value!r}" in str(error.value)
            assert valid.text in str(error.value)


@pytest.mark.parametrize("name", METHODS)
def test_the_defaults_of_every_method_pass(name):
    method(name).check(KVCacheConfig(method=name))


@pytest.mark.parametrize("name", METHODS)
def test_create_gives_the_documented_kind_of_cache(name):
    config = KVCacheConfig(method=name)
    if name == "kvzip":
        with pytest.raises(QuantizerConfigError, match=r"kvzip_probe='context'.*for_model"):  # it needs the model
            KVCacheFactory.create(config)
        config = KVCacheConfig(method=name, kvzip_probe="latest")
    kind = KVCache if name in STANDALONE_METHODS else ServingCache
    assert isinstance(KVCacheFactory.create(config), kind)


def test_settings_of_another_method_are_no_error():
    assert KVCacheFactory.create(KVCacheConfig(method="kivi", options=SnapKVOptions(snap_budget=9)))


@pytest.mark.parametrize("config", [None, "kivi", {"method": "kivi"}])
def test_something_else_than_a_config_is_refused(config):
    with pytest.raises(QuantizerConfigError, match="config=.*KVCacheConfig"):
        KVCacheFactory.create(config)


BUILDER = [
    ("with_method", ("kivi",), {"method": "kivi"}),
    ("with_head_dim", (64,), {"head_dim": 64}),
    ("with_bit_width", (2, 4), {"bit_width_inlier": 2, "bit_width_outlier": 4}),
    ("with_bit_width", (3,), {"bit_width_inlier": 3, "bit_width_outlier": None}),
    ("with_jl_dim", (32,), {"jl_dim": 32}),
    ("with_n_outlier_channels", (8,), {"n_outlier_channels": 8}),
    ("with_n_calib_tokens", (64,), {"n_calib_tokens": 64}),
    ("with_vectorized_attend", (False,), {"enable_vectorized_attend": False}),
    ("with_outlier_two_stream", (), {"enable_outlier_two_stream": True}),
    ("with_fused_query_dot", (), {"enable_fused_query_dot": True}),
    ("with_seed", (1,), {"seed": 1}),
    ("with_precision", (mx.float16,), {"dtype": mx.float16}),
    ("with_capacity", (100,), {"capacity": 100}),
    ("with_artifact_store", ("checked by build",), {"store": "checked by build"}),
    ("with_sliding_window", (16,), {"sliding_window": 16}),
]


@pytest.mark.parametrize(("verb", "arguments", "fields"), BUILDER)
def test_builder_methods_set_their_fields_and_return_the_builder(verb, arguments, fields):
    builder = KVCacheBuilder()
    assert getattr(builder, verb)(*arguments) is builder
    assert builder._config == dataclasses.replace(KVCacheConfig(), **fields)


def test_builder_collects_observers_and_shows_its_config():
    first, second = EventLog(), EventLog()
    builder = KVCacheBuilder().with_observer(first).with_observer(second)
    assert builder._config.observers == [first, second]
    assert repr(builder) == "KVCacheBuilder(config=KVCacheConfig(method='turboquant_rvq', d=128, b=2, seed=42))"


def test_build_makes_a_cache_that_later_steps_do_not_change():
    builder = KVCacheBuilder().with_method("kivi").with_head_dim(64).with_bit_width(4).with_observer(EventLog())
    cache: Any = builder.build()
    builder.with_head_dim(32).with_observer(EventLog())
    assert cache.config.head_dim == 64
    assert len(cache.config.observers) == 1
