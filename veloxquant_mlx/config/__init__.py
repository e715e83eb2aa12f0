"""Automatic choice of a configuration."""

from .auto_config import (
    AutoConfigResult,
    HardwareInfo,
    WorkloadSpec,
    detect_hardware_info,
    select_kv_cache_config,
)

__all__ = ["AutoConfigResult", "HardwareInfo", "WorkloadSpec", "detect_hardware_info", "select_kv_cache_config"]
