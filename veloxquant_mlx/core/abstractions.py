"""Abstract base classes of the public surface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from ..observers.events import QuantizationEvent


class KVCache(ABC):
    """A cache of one head that is fed one token at a time (the standalone methods; not mlx_lm's serving cache)."""

    @abstractmethod
    def append_key(self, k: mx.array) -> None:
        """Add the key ``(D,)`` of the next token."""

    @abstractmethod
    def append_value(self, v: mx.array) -> None:
        """Add the value ``(D,)`` of the next token."""

    @abstractmethod
    def attend(self, q: mx.array) -> mx.array:
        """Attention output ``(D,)`` of the query ``(D,)`` over every token held."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes held."""

    def append(self, k: mx.array, v: mx.array) -> None:
        """Add the key and the value of the next token."""
        self.append_key(k)
        self.append_value(v)

    def reset(self) -> None:
        """Forget every token; calibration stays."""
        raise NotImplementedError(f"{type(self).__name__} does not implement reset()")

    def __len__(self) -> int:
        """Tokens held."""
        raise NotImplementedError(f"{type(self).__name__} does not implement __len__()")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(size={len(self)})"


class ArtifactStore(ABC):
    """Keeps what is expensive or must be reproducible: rotations, codebooks, projection matrices."""

    @abstractmethod
    def load_rotation_matrix(self, d: int, seed: int) -> mx.array:
        """The rotation ``(d, d)``; ``ArtifactNotFoundError`` when it is not there."""

    @abstractmethod
    def save_rotation_matrix(self, Pi: mx.array, d: int, seed: int) -> None:
        """Keep the rotation ``Pi`` ``(d, d)``."""

    @abstractmethod
    def load_codebook(self, distribution: str, b: int, d: int) -> mx.array:
        """The codebook of ``b`` bits; ``ArtifactNotFoundError`` when it is not there."""

    @abstractmethod
    def save_codebook(self, cb: mx.array, distribution: str, b: int, d: int) -> None:
        """Keep the codebook ``cb`` of ``b`` bits."""

    @abstractmethod
    def load_jl_matrix(self, d: int, m: int, seed: int) -> mx.array:
        """The projection ``(m, d)``; ``ArtifactNotFoundError`` when it is not there."""

    @abstractmethod
    def save_jl_matrix(self, S: mx.array, d: int, m: int, seed: int) -> None:
        """Keep the projection ``S`` ``(m, d)``."""

    @abstractmethod
    def exists(self, artifact_type: str, **kwargs: Any) -> bool:
        """Whether an artifact of type "rotation", "codebook" or "jl" with these parameters is there."""


class QuantizationObserver(ABC):
    """Receives an event for every encode, evict and trim of a cache."""

    @abstractmethod
    def on_event(self, event: QuantizationEvent) -> None:
        """Called after the work is done. Must not change the cache."""
