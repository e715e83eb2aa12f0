"""What a codec may know about rows beyond the rows themselves: how the model's real queries attend to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step


class Guide(ABC):
    """Watches every attention and answers, when rows are sealed, what a ``guided`` codec gets beside them.

    What it remembers lives in the store: per row in ``store.row_aux``, anything else in ``store.aux``.
    ``needs_queries``: it cannot work where the model's attention does not come back to the cache.
    """

    needs_queries: bool = True

    @abstractmethod
    def observe(self, store: Store, step: Step) -> None:
        """See one attention over the rows held, before any of them is sealed."""

    @abstractmethod
    def rows(self, store: Store, start: int, stop: int) -> mx.array:
        """What the codec gets for rows ``start`` to ``stop``, which are about to be sealed."""
