"""When rows are dropped, and which. One class for every method that drops rows; methods choose its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from ..models.rope import Rotation
from . import select
from .scores import Score

if TYPE_CHECKING:
    from ..attention.entry import KeyView
    from ..cache.store import Store


@dataclass(frozen=True)
class Eviction:
    """Keep at most ``budget`` rows per kv head: the first ``sinks`` positions, the newest ``recent`` rows, top scores.

    Rows are dropped at the end of the prompt, or after every call with ``bounded=True``. Without a ``score`` the kept
    rows are sinks and recents alone (``sinks + recent == budget``). With a ``rotation`` the sink rows' keys are moved
    along by as many positions as rows were dropped: streaming methods count positions inside the cache.
    """

    budget: int
    sinks: int = 0
    recent: int = 1
    score: Score | None = None
    bounded: bool = False
    rotation: Rotation | None = None

    def observe(self, store: Store, q: mx.array) -> None:
        """See the queries of one call."""
        if self.score is not None:
            self.score.observe(store, q)

    def drop(self, store: Store, scale: float, sinks: mx.array | None) -> int:
        """Drop the rows beyond the budget; returns how many per head. ``sinks`` are learned sink logits."""
        excess = store.n - self.budget
        if excess <= 0:
            return 0
        if self.score is None:
            store.cut(self.sinks, self.sinks + excess)
        else:
            score = select.protect(self.score.score(store, scale, sinks), store.positions, self.sinks, self.recent)
            store.keep(select.top(score, self.budget))
        return excess

    def forget(self, store: Store) -> None:
        """Free what the score remembers."""
        if self.score is not None:
            self.score.forget(store)

    def key_view(self, dropped: int) -> KeyView | None:
        """How attention must see keys ``(B, H, n, D)`` once ``dropped`` rows are gone; None for as they are."""
        rotation, sinks = self.rotation, self.sinks
        if rotation is None or dropped == 0 or sinks == 0:
            return None
        return lambda keys: mx.concatenate([rotation(keys[:, :, :sinks], dropped), keys[:, :, sinks:]], axis=2)
