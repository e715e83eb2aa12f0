"""Picks a method, bits and a group size from a description of the job and the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx

from ..cache.base import KVCacheConfig
from ..core.exceptions import QuantizerConfigError
from ..core.types import is_int

SHORT_CONTEXT_TOKENS = 2048
LONG_CONTEXT_TOKENS = 16384
LARGE_HEAD_DIM = 256
MEMORY_PRESSURE_FRACTION = 0.75


@dataclass(frozen=True)
class WorkloadSpec:
    """The job: head size (a power of 2), tokens, attention layers, concurrent sequences and key/value heads.

    ``n_layers``, ``batch_size`` and ``n_kv_heads`` only size the estimate of memory. Raises ``QuantizerConfigError``.
    """

    head_dim: int = 128
    seq_len: int = 4_096
    n_layers: int = 1
    batch_size: int = 1
    n_kv_heads: int = 1

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            power_missing = f.name == "head_dim" and is_int(value) and value & (value - 1)
            if not is_int(value) or value < 1 or power_missing:
                valid = "a power of 2, an int >= 1" if f.name == "head_dim" else "an int >= 1"
                raise QuantizerConfigError(
                    f"{f.name}={value!r} cannot be used: it must be {valid}. The default is {f.default}."
                )

    def fp16_kv_bytes(self) -> int:
        """Bytes of all keys and values of the job at 16 bits."""
        return 2 * self.batch_size * self.n_layers * self.n_kv_heads * self.seq_len * self.head_dim * 2


@dataclass(frozen=True)
class HardwareInfo:
    """The machine: total memory (None: unknown, no rule about memory applies) and what is in use already."""

    total_memory_bytes: int | None = None
    active_memory_bytes: int = 0

    def pressure_fraction(self, additional_bytes: int) -> float | None:
        """Share of the memory in use once ``additional_bytes`` are added; None if the total is unknown."""
        if not self.total_memory_bytes:
            return None
        return (self.active_memory_bytes + additional_bytes) / self.total_memory_bytes


@dataclass(frozen=True)
class AutoConfigResult:
    """A configuration and one sentence on why it was chosen."""

    config: KVCacheConfig
    reason: str


def detect_hardware_info() -> HardwareInfo:
    """The memory of this machine: unified memory on Metal, of the GPU on CUDA, physical memory on the CPU back end.

    Documented to return the empty ``HardwareInfo()`` when the device cannot be read, for whatever reason.
    """
    try:
        info = mx.device_info()
        total = int(info.get("memory_size") or info.get("total_memory") or _physical_memory())
        recommended = info.get("max_recommended_working_set_size")
        if isinstance(recommended, int) and 0 < recommended < total:
            total = recommended
        return HardwareInfo(total, mx.get_active_memory())
    except Exception:
        return HardwareInfo()


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def select_kv_cache_config(workload: WorkloadSpec, hardware: HardwareInfo | None = None) -> AutoConfigResult:
    """The configuration for a job; ``hardware=None`` reads this machine.

    Memory pressure of 75% and more: ``gear``. Else by length: ``turboquant_rvq`` with 4 bits, ``kivi`` from 2,048
    tokens on, ``kvquant`` from 16,384 on. Heads of 256 and more get groups of 64.

    >>> select_kv_cache_config(WorkloadSpec(seq_len=8_192), HardwareInfo()).config.method
    'kivi'
    """
    hardware = detect_hardware_info() if hardware is None else hardware
    pressure = hardware.pressure_fraction(workload.fp16_kv_bytes())
    tokens, d = workload.seq_len, workload.head_dim
    fields: dict[str, Any]
    if pressure is not None and pressure >= MEMORY_PRESSURE_FRACTION:
        fields = {"method": "gear", "gear_bits": 2}
        why = (
            f"memory pressure of {pressure:.0%} with 16-bit keys and values, at or above {MEMORY_PRESSURE_FRACTION:.0%}"
        )
    elif tokens < SHORT_CONTEXT_TOKENS:
        fields = {"method": "turboquant_rvq", "bit_width_inlier": 4}
        why = f"short context of {tokens} tokens, below {SHORT_CONTEXT_TOKENS}"
    elif tokens < LONG_CONTEXT_TOKENS:
        fields = {"method": "kivi", "bit_width_inlier": 2}
        why = f"mid-length context of {tokens} tokens, below {LONG_CONTEXT_TOKENS}"
    else:
        fields = {"method": "kvquant", "kvquant_bits": 3, "kvquant_outlier_fraction": 0.01}
        why = f"long context of {tokens} tokens, at or above {LONG_CONTEXT_TOKENS}"
    name = fields["method"]
    if d >= LARGE_HEAD_DIM and name != "turboquant_rvq":
        fields[f"{name}_group_size"] = 64
        why += f"; groups of 64 for heads of {d}"
    return AutoConfigResult(KVCacheConfig(head_dim=d, **fields), f"{name}: {why}")
