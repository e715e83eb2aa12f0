"""Automatic configuration: the documented rules."""

# Wrong types are the subject here.
# pyright: reportArgumentType=false

import dataclasses

import mlx.core as mx
import pytest

from veloxquant_mlx import (
    HardwareInfo,
    KVCacheConfig,
    QuantizerConfigError,
    WorkloadSpec,
    detect_hardware_info,
    select_kv_cache_config,
)
from veloxquant_mlx.cache.registry import method
from veloxquant_mlx.config import auto_config

GIB = 1024**3
ROOMY = HardwareInfo(total_memory_bytes=1024 * GIB)


def test_constants():
    assert (auto_config.SHORT_CONTEXT_TOKENS, auto_config.LONG_CONTEXT_TOKENS) == (2048, 16384)
    assert (auto_config.LARGE_HEAD_DIM, auto_config.MEMORY_PRESSURE_FRACTION) == (256, 0.75)


def test_workload_defaults_and_bytes():
    assert dataclasses.astuple(WorkloadSpec()) == (128, 4096, 1, 1, 1)
    assert WorkloadSpec(64, 1000, 3, 2, 5).fp16_kv_bytes() == 2 * 2 * 3 * 1000 * 64 * 2 * 5


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(WorkloadSpec)])
@pytest.mark.parametrize("value", [0, -4, 64.0, True, None, "64"])
def test_workload_refuses(field, value):
    with pytest.raises(QuantizerConfigError, match=rf"{field}={value!r}.*>= 1.*default"):
        WorkloadSpec(**{field: value})


def test_head_dim_is_a_power_of_two():
    with pytest.raises(QuantizerConfigError, match=r"head_dim=96.*power of 2"):
        WorkloadSpec(head_dim=96)


@pytest.mark.parametrize("obj", [WorkloadSpec(), HardwareInfo(), select_kv_cache_config(WorkloadSpec(), ROOMY)])
def test_values_are_frozen(obj):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(obj, dataclasses.fields(obj)[0].name, 1)


@pytest.mark.parametrize(
    ("total", "active", "more", "fraction"),
    [(100, 50, 25, 0.75), (100, 90, 60, 1.5), (None, 50, 25, None), (0, 50, 25, None)],
)
def test_pressure_fraction(total, active, more, fraction):
    assert HardwareInfo(total, active).pressure_fraction(more) == fraction


@pytest.mark.parametrize(
    ("workload", "fields", "why"),
    [
        ({"seq_len": 2047}, {"method": "turboquant_rvq", "bit_width_inlier": 4}, "short context"),
        ({"seq_len": 2048}, {"method": "kivi"}, "mid-length context"),
        ({"seq_len": 16383}, {"method": "kivi"}, "mid-length context"),
        ({"seq_len": 16384}, {"method": "kvquant"}, "long context"),
        ({"seq_len": 100, "head_dim": 256}, {"method": "turboquant_rvq", "bit_width_inlier": 4}, "short context"),
        ({"seq_len": 4096, "head_dim": 256}, {"method": "kivi", "kivi_group_size": 64}, "mid-length context"),
        ({"seq_len": 20000, "head_dim": 512}, {"method": "kvquant", "kvquant_group_size": 64}, "long context"),
        ({"seq_len": 20000, "head_dim": 128}, {"method": "kvquant", "kvquant_group_size": 32}, "long context"),
    ],
)
def test_rules_of_length_and_head_size(workload, fields, why):
    spec = WorkloadSpec(**workload)
    result = select_kv_cache_config(spec, ROOMY)
    assert result.config == KVCacheConfig(head_dim=spec.head_dim, **fields)
    assert why in result.reason
    assert result.config.method in result.reason
    assert "memory pressure" not in result.reason
    method(result.config.method).check(result.config)


@pytest.mark.parametrize(("active", "chosen"), [(749, "turboquant_rvq"), (750, "gear")])
def test_memory_pressure_comes_first(active, chosen):
    spec = WorkloadSpec(head_dim=1, seq_len=1)  # 4 bytes
    assert select_kv_cache_config(spec, HardwareInfo(1000, active - 4)).config.method == chosen


def test_pressure_is_reported_as_a_percentage():
    result = select_kv_cache_config(WorkloadSpec(head_dim=256), HardwareInfo(2 * 256 * 4096 * 2))
    assert result.config == KVCacheConfig(method="gear", head_dim=256, gear_group_size=64)
    assert all(part in result.reason for part in ("gear", "memory pressure", "100%"))


def test_documented_example():
    result = select_kv_cache_config(
        WorkloadSpec(head_dim=128, seq_len=64_000, n_layers=32, batch_size=4),
        HardwareInfo(total_memory_bytes=32 * GIB, active_memory_bytes=4 * GIB),
    )
    assert result.config.method == "kvquant"
    assert "long context" in result.reason


@pytest.mark.parametrize(
    ("info", "total"),
    [
        ({"memory_size": 64}, 64),
        ({"memory_size": 64, "max_recommended_working_set_size": 48}, 48),
        ({"memory_size": 64, "max_recommended_working_set_size": 0}, 64),
        ({"memory_size": 64, "max_recommended_working_set_size": 80}, 64),
        ({"total_memory": 32}, 32),  # CUDA
        ({"device_name": "CPU"}, 4096),  # the CPU back end: the machine's physical memory
    ],
)
def test_detect_reads_every_back_end(monkeypatch, info, total):
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 7)
    monkeypatch.setattr(auto_config, "_physical_memory", lambda: 4096)
    assert detect_hardware_info() == HardwareInfo(total, 7)


def test_detect_never_raises(monkeypatch):
    def broken():
        raise RuntimeError("no device")

    monkeypatch.setattr(mx, "device_info", broken)
    assert detect_hardware_info() == HardwareInfo()


def test_this_machine_is_read():
    assert (detect_hardware_info().total_memory_bytes or 0) > 2**28


def test_missing_hardware_is_detected(monkeypatch):
    monkeypatch.setattr(auto_config, "detect_hardware_info", lambda: HardwareInfo(1, 1))
    assert select_kv_cache_config(WorkloadSpec()).config.method == "gear"
