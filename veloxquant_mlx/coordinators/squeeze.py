"""Budgets of layers by how much their attention changes the hidden state, settled when the prompt ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..models.inspect import hidden_size
from ..policies.budgets import squeezed
from . import residual
from .base import Coordinator

if TYPE_CHECKING:
    from ..cache.layer import CompressedKVCache
    from ..models.inspect import Slot


@dataclass(frozen=True)
class Squeeze(Coordinator):
    """Spreads ``mean`` rows per layer; the least important layers are left with ``smallest``. ``most`` caps a layer.

    Every layer notes the cosines of its prompt's tokens, the last one left out. Budgets are settled when the call of
    that token begins (or ``end_prefill``) and never again for these caches. A prompt of one token spreads nothing.
    """

    mean: int
    smallest: int
    most: int | None = None

    def attach(self, model: Any, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.layer is not None:
                residual.watch(slot.block, slot.attention, hidden_size(model), _listens)

    def before(
        self, model: Any, inputs: mx.array, caches: list[CompressedKVCache], whole: Callable[[], list[Any]]
    ) -> None:
        if inputs.shape[1] == 1 and not caches[0].empty():
            self._settle(caches, newest=True)

    def ends(self, caches: list[CompressedKVCache]) -> None:
        self._settle(caches, newest=False)

    def _settle(self, caches: list[CompressedKVCache], newest: bool) -> None:
        """Give every layer its budget; ``newest``: the newest token that was noted is not the prompt's last."""
        if not any(map(_listens, caches)):
            return
        notes = [cache.store.aux.pop(residual.COSINES, None) for cache in caches]
        budgets = [self.mean] * len(caches)
        if all(note is not None for note in notes):
            sums = np.array(mx.stack(notes), np.float64)  # type: ignore[reportArgumentType]
            counts = sums[:, 2] if newest else sums[:, 2] - 1
            if sums[:, 2].min() > 1:
                budgets = squeezed(((sums[:, 0] + newest * sums[:, 1]) / counts).tolist(), self.mean, self.smallest)
        for cache, budget in zip(caches, budgets, strict=True):
            cache.life.budget = budget if self.most is None else min(budget, self.most)
            cache.notes = (f"settled by the prompt: {cache.life.budget} tokens of {self.mean} per layer",)


def _listens(cache: CompressedKVCache) -> bool:
    """Whether the budgets of this cache are still open."""
    return isinstance(cache.coordinator, Squeeze) and cache.life.budget is None
