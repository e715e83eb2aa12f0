"""KV-cache compression for mlx_lm models: packed bytes, real queries, one cache per layer."""

from typing import TYPE_CHECKING, Any

from .cache.base import KVCacheBuilder, KVCacheConfig, KVCacheFactory
from .config import AutoConfigResult, HardwareInfo, WorkloadSpec, detect_hardware_info, select_kv_cache_config
from .core import (
    ArtifactDamagedError,
    ArtifactNotFoundError,
    ArtifactStore,
    CacheInputError,
    CacheStateError,
    KernelUnavailableError,
    KVCache,
    QuantizationObserver,
    QuantizerConfigError,
    VeloxError,
)

if TYPE_CHECKING:
    from .cache.report import cache_report

__version__ = "0.1.0"

__all__ = [
    "ArtifactDamagedError",
    "ArtifactNotFoundError",
    "ArtifactStore",
    "AutoConfigResult",
    "CacheInputError",
    "CacheStateError",
    "HardwareInfo",
    "KVCache",
    "KVCacheBuilder",
    "KVCacheConfig",
    "KVCacheFactory",
    "KernelUnavailableError",
    "QuantizationObserver",
    "QuantizerConfigError",
    "VeloxError",
    "WorkloadSpec",
    "__version__",
    "cache_report",
    "detect_hardware_info",
    "select_kv_cache_config",
]


def __getattr__(name: str) -> Any:
    # The receipt imports mlx_lm, which takes seconds: not before somebody asks for it.
    if name == "cache_report":
        from .cache.report import cache_report

        return cache_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
