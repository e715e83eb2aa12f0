"""Abstract base classes, errors and value types."""

from .abstractions import ArtifactStore, KVCache, QuantizationObserver
from .exceptions import (
    ArtifactDamagedError,
    ArtifactNotFoundError,
    CacheInputError,
    CacheStateError,
    KernelUnavailableError,
    QuantizerConfigError,
    VeloxError,
)
from .types import LayerInfo, Recipe, Stream

__all__ = [
    "ArtifactDamagedError",
    "ArtifactNotFoundError",
    "ArtifactStore",
    "CacheInputError",
    "CacheStateError",
    "KVCache",
    "KernelUnavailableError",
    "LayerInfo",
    "QuantizationObserver",
    "QuantizerConfigError",
    "Recipe",
    "Stream",
    "VeloxError",
]
