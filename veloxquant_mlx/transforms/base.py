"""What every transform says: an invertible linear map of the head dimension."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx


class Transform(ABC):
    """A fixed change of basis of the last axis. ``<q, k> == <on_query(q), forward(k)>`` for every q and k."""

    @abstractmethod
    def forward(self, x: mx.array) -> mx.array:
        """``(..., D)`` to the transformed basis, in float32."""

    @abstractmethod
    def inverse(self, y: mx.array) -> mx.array:
        """Back from the transformed basis, in float32."""

    def on_query(self, q: mx.array) -> mx.array:
        """The map that queries need; the same as ``forward`` where the transform is orthogonal."""
        return self.forward(q)
