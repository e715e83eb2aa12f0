"""KV-cache compression for mlx_lm models: packed bytes, real queries, one cache per layer."""

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
    "detect_hardware_info",
    "select_kv_cache_config",
]
