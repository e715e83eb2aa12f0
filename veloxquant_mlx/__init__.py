"""KV-cache compression for mlx_lm models: packed bytes, real queries, one cache per layer."""

from importlib import import_module
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
    from .cache.attach import attach
    from .cache.files import load_cache, save_cache
    from .cache.prepare import prepare_kvzip
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
    "attach",
    "cache_report",
    "detect_hardware_info",
    "load_cache",
    "prepare_kvzip",
    "save_cache",
    "select_kv_cache_config",
]

# These import mlx_lm, which takes seconds: not before somebody asks for them.
_LATE = {
    "attach": "attach",
    "cache_report": "report",
    "load_cache": "files",
    "prepare_kvzip": "prepare",
    "save_cache": "files",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"{__name__}.cache.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
