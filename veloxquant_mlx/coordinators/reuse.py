"""Neighbouring layers keep the same tokens: the first of each group chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..policies import chunks
from .base import Coordinator

if TYPE_CHECKING:
    from ..cache.layer import CompressedKVCache


@dataclass(frozen=True)
class Reuse(Coordinator):
    """Groups of ``layers`` layers, those left to the model's own caches not counted, share one choice of rows.

    It is taken over in the same forward, and only where as many rows are held; other layers choose by themselves.
    """

    layers: int

    def before(
        self, model: Any, inputs: mx.array, caches: list[CompressedKVCache], whole: Callable[[], list[Any]]
    ) -> None:
        for group in self._groups(caches):
            chunks.share([cache.store for cache in group])

    def _groups(self, caches: list[CompressedKVCache]) -> Iterator[list[CompressedKVCache]]:
        for _, group in groupby(caches, key=lambda cache: cache.layer.rank // self.layers):
            yield list(group)
