"""Events, and that a cache's work reaches the observers of its configuration."""

import dataclasses
from typing import Any

import mlx.core as mx
import pytest

from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizationObserver
from veloxquant_mlx.observers import EventLog, QuantizationEvent


def test_event_fields_and_defaults():
    assert [f.name for f in dataclasses.fields(QuantizationEvent)] == [
        "stage",
        "input_shape",
        "elapsed_ms",
        "memory_delta_bytes",
        "metadata",
    ]
    event = QuantizationEvent("encode", (1, 2, 3, 4))
    assert (event.elapsed_ms, event.memory_delta_bytes, dict(event.metadata)) == (0.0, 0, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.stage = "trim"  # type: ignore[misc]


def test_observer_is_abstract_and_the_log_counts():
    with pytest.raises(TypeError, match="abstract"):
        QuantizationObserver()  # type: ignore[abstract]
    log = EventLog()
    for stage in ("encode", "trim", "encode"):
        log.on_event(QuantizationEvent(stage, ()))
    assert log.counts() == {"encode": 2, "trim": 1}
    assert [event.stage for event in log.events] == ["encode", "trim", "encode"]


def test_a_cache_emits_events():
    log = EventLog()
    cache: Any = KVCacheFactory.create(KVCacheConfig(method="kivi", head_dim=64, residual_length=32, observers=[log]))
    x = mx.random.normal((1, 2, 96, 64), key=mx.random.key(0))
    cache.update_and_fetch(x, x)
    cache.attend(x, scale=0.125, mask="causal")
    cache.trim(1)
    assert set(log.counts()) == {"encode", "trim"}
    encode = log.events[0]
    # 96 float32 rows of keys and the 64 values older than the window lose more than half of their bytes.
    assert encode.memory_delta_bytes < -(96 + 64) * 2 * 64 * 4 // 2
