"""KVCacheConfig: the 225 fields, options, deprecation, equality and copies."""

# Wrong types are the subject here.
# pyright: reportArgumentType=false

import ast
import copy
import dataclasses
import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.artifacts import InMemoryArtifactStore
from veloxquant_mlx.cache import options
from veloxquant_mlx.cache._flat import OWNER
from veloxquant_mlx.cache.options import H2OOptions, KIVIOptions, SnapKVOptions
from veloxquant_mlx.cache.registry import METHODS
from veloxquant_mlx.observers import EventLog

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = (Path(__file__).parent / "reference_fields.txt").read_text().splitlines()
FIELDS = dataclasses.fields(KVCacheConfig)
# Fields of no options class, which never warn.
GENERAL = [
    "method",
    "head_dim",
    "bit_width_inlier",
    "bit_width_outlier",
    "jl_dim",
    "n_outlier_channels",
    "n_calib_tokens",
    "enable_vectorized_attend",
    "enable_outlier_two_stream",
    "enable_fused_query_dot",
    "seed",
    "dtype",
    "capacity",
    "sliding_window",
    "store",
    "observers",
    "options",
    "n_sink_tokens",
    "smooth_factors",
    "key_codebook",
    "value_codebook",
    "use_metal_kernels",
    "fused_sdpa",
    "fused_sdpa_max_ctx",
    "fused_sdpa_memory_bound",
]


def test_fields_are_those_of_the_reference():
    for line, f in zip(REFERENCE, FIELDS, strict=True):
        (name, annotation, default), *_ = re.findall(r"^(\w+): (.+?)(?: = (.+))?$", line)
        assert f.name == name
        if name == "method":
            assert ast.literal_eval(annotation.removeprefix("Literal")) == list(METHODS)
        else:
            assert str(f.type).replace('"', "'") == annotation
        if name == "observers":
            assert f.default_factory is list
        else:
            assert f.default == ast.literal_eval(default)
            assert type(f.default) is type(ast.literal_eval(default))


def test_there_are_225_fields_in_the_constructor_too():
    assert len(FIELDS) == 225
    assert list(inspect.signature(KVCacheConfig).parameters) == [f.name for f in FIELDS]


def test_generated_file_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "tools/generate_flat.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_options_fields_have_the_flat_defaults():
    flat = {f.name: f.default for f in FIELDS}
    for cls in (getattr(options, name) for name in options.__all__):
        for f in dataclasses.fields(cls):
            assert f.default == flat[f.name]
            assert OWNER[f.name] == cls.__name__
            assert f.metadata["help"]
            assert f.metadata["valid"].accepts(f.default)
    assert len(OWNER) == 200
    assert set(GENERAL) == {f.name for f in FIELDS} - set(OWNER)


def test_repr():
    shown = repr(KVCacheConfig(method="kivi", head_dim=64, bit_width_inlier=[2, 4], seed=7))
    assert shown == "KVCacheConfig(method='kivi', d=64, b=[2, 4], seed=7)"


def test_constructor_validates_nothing():
    config = KVCacheConfig(method="no such method", head_dim=-1, snap_budget="many")
    assert (config.method, config.head_dim, config.snap_budget) == ("no such method", -1, "many")


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"options": KIVIOptions(64)}, "kivi_group_size", 64),
        ({"options": KIVIOptions(64), "kivi_group_size": 16}, "kivi_group_size", 16),
        ({"options": KIVIOptions(64), "kivi_group_size": 32}, "kivi_group_size", 32),  # named, though the default
        ({"options": SnapKVOptions(snap_budget=99), "snap_n_sink": 1}, "snap_budget", 99),
        ({"method": "h2o", "options": SnapKVOptions(snap_budget=99)}, "snap_budget", 99),  # another method's options
        ({"options": {"snap_budget": 99}}, "snap_budget", 512),  # not a dataclass: ignored
        ({"options": SnapKVOptions}, "snap_budget", 512),
    ],
)
def test_options_fill_the_flat_fields(arguments, field, value):
    assert getattr(KVCacheConfig(**arguments), field) == value


def test_positional_flat_fields_win_over_options():
    values = [f.default if f.default_factory is dataclasses.MISSING else [] for f in FIELDS]
    values[[f.name for f in FIELDS].index("options")] = KIVIOptions(64)
    assert KVCacheConfig(*values).kivi_group_size == 32


def test_options_are_read_once():
    opts = H2OOptions(h2o_budget=64)
    config = KVCacheConfig(method="h2o", options=opts)
    opts.h2o_budget = 128
    config.options = H2OOptions(h2o_budget=256)
    assert config.h2o_budget == 64


def test_assigning_a_flat_field_warns_once_and_sets_it():
    config = KVCacheConfig()
    with pytest.warns(DeprecationWarning, match=r"snap_budget.*SnapKVOptions") as caught:
        config.snap_budget = 64
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert config.snap_budget == 64


@pytest.mark.parametrize("name", GENERAL)
def test_general_fields_never_warn(name):
    config = KVCacheConfig()
    setattr(config, name, None)  # warnings are errors in these tests
    assert getattr(config, name) is None


def test_observers_are_fresh_per_instance():
    assert KVCacheConfig().observers is not KVCacheConfig().observers


def test_equality_is_by_value():
    book, other = mx.array([1.0, 2.0]), mx.array([1.0, 3.0])
    assert KVCacheConfig(key_codebook=book) == KVCacheConfig(key_codebook=mx.array([1.0, 2.0]))
    assert KVCacheConfig(key_codebook=book) != KVCacheConfig(key_codebook=other)
    assert KVCacheConfig(key_codebook=book) != KVCacheConfig(key_codebook=np.array([1.0, 2.0], np.float32))
    assert KVCacheConfig(key_codebook=book) != KVCacheConfig()
    assert KVCacheConfig(seed=1) != KVCacheConfig(seed=2)
    assert KVCacheConfig() != "a config"


def test_copies_share_store_and_observers():
    log, store = EventLog(), InMemoryArtifactStore()
    config = KVCacheConfig(
        method="kivi", dtype=mx.float16, store=store, observers=[log], options=KIVIOptions(64), key_codebook=mx.ones(2)
    )
    for twin in (copy.deepcopy(config), dataclasses.replace(config)):
        assert twin == config
        assert twin.store is store
        assert twin.observers[0] is log
    deep = copy.deepcopy(config)
    deep.observers.append(EventLog())
    assert deep.options is not config.options
    assert config.observers == [log]


def test_replace_changes_flat_fields_without_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = dataclasses.replace(KVCacheConfig(options=KIVIOptions(64)), kivi_group_size=16, seed=1)
    assert (config.kivi_group_size, config.seed) == (16, 1)
