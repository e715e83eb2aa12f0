"""Every documented name is importable from every documented place."""

import doctest
import importlib
import typing
from importlib.resources import files

import pytest

import veloxquant_mlx as vm
from veloxquant_mlx.cache import base, options, registry

CONFIG = ("WorkloadSpec", "HardwareInfo", "AutoConfigResult", "select_kv_cache_config", "detect_hardware_info")
ABSTRACT = ("KVCache", "ArtifactStore", "QuantizationObserver")
PLACES = {
    ("veloxquant_mlx", "veloxquant_mlx.cache", "veloxquant_mlx.cache.base"): (
        "KVCacheConfig",
        "KVCacheFactory",
        "KVCacheBuilder",
    ),
    ("veloxquant_mlx.cache.base",): ("STANDALONE_METHODS", "MethodName"),
    ("veloxquant_mlx", "veloxquant_mlx.core", "veloxquant_mlx.core.abstractions"): ABSTRACT,
    ("veloxquant_mlx", "veloxquant_mlx.core", "veloxquant_mlx.core.exceptions"): (
        "QuantizerConfigError",
        "ArtifactNotFoundError",
    ),
    ("veloxquant_mlx", "veloxquant_mlx.config", "veloxquant_mlx.config.auto_config"): CONFIG,
    ("veloxquant_mlx.config.auto_config",): (
        "SHORT_CONTEXT_TOKENS",
        "LONG_CONTEXT_TOKENS",
        "LARGE_HEAD_DIM",
        "MEMORY_PRESSURE_FRACTION",
    ),
    ("veloxquant_mlx.cache", "veloxquant_mlx.cache.sliding_window_cache"): ("SlidingWindowKVCache",),
    ("veloxquant_mlx.artifacts",): ("InMemoryArtifactStore", "NpyArtifactStore"),
    ("veloxquant_mlx.observers",): ("QuantizationEvent",),
}
CASES = [(name, places) for places, names in PLACES.items() for name in names]


@pytest.mark.parametrize(("name", "places"), CASES, ids=[name for name, _ in CASES])
def test_importable_and_the_same_object_everywhere(name, places):
    found = [getattr(importlib.import_module(place), name) for place in places]
    assert all(obj is found[0] for obj in found)


@pytest.mark.parametrize("name", vm.__all__)
def test_public_names_exist(name):
    assert hasattr(vm, name)


def test_names_that_stay_out_of_the_top_level():
    hidden = {"STANDALONE_METHODS", "SlidingWindowKVCache", "NpyArtifactStore", *options.__all__}
    assert not hidden & set(dir(vm))


def test_typed_and_versioned():
    assert files("veloxquant_mlx").joinpath("py.typed").is_file()
    assert vm.__version__ == "0.1.0"


def test_method_names():
    assert len(registry.METHODS) == len(set(registry.METHODS)) == 43
    assert typing.get_type_hints(vm.KVCacheConfig)["method"] == base.MethodName


def test_standalone_methods_agree_with_the_method_files():
    declared = {name for name in registry.METHODS if registry.method(name).info.standalone}
    assert base.STANDALONE_METHODS == declared == {"turboquant_prod", "turboquant_mse", "polar", "qjl", "spectral"}


@pytest.mark.parametrize("name", registry.METHODS)
def test_every_method_says_who_it_is(name):
    info = registry.method(name).info
    assert info.name == name
    assert info.title
    assert info.family
    assert info.needs
    assert (info.paper is None) == (name in ("turboquant_rvq", "age_tiered"))
    assert info.arxiv is None or info.arxiv in str(registry.method(name).module.__doc__)


def test_options_classes():
    classes = {registry.method(name).info.options for name in registry.METHODS} - {None}
    assert classes == {getattr(options, name) for name in options.__all__}
    assert len(options.__all__) == 37
    without = [name for name in registry.METHODS if registry.method(name).info.options is None]
    assert without == ["turboquant_prod", "turboquant_mse", "turboquant_rvq", "polar", "qjl"]


@pytest.mark.parametrize("error", [vm.QuantizerConfigError, vm.KernelUnavailableError])
def test_configuration_errors_are_value_errors(error):
    assert issubclass(error, ValueError)
    assert issubclass(error, vm.VeloxError)


def test_other_errors_keep_their_documented_base():
    assert issubclass(vm.ArtifactNotFoundError, FileNotFoundError)
    assert issubclass(vm.KernelUnavailableError, RuntimeError)


@pytest.mark.parametrize("module", ["cache.base", "cache.options", "config.auto_config"])
def test_examples_run(module):
    result = doctest.testmod(importlib.import_module(f"veloxquant_mlx.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
