"""What a codec may know about rows beyond the rows themselves: how the model's real queries attend to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from ..cache.store import Store
    from ..cache.stream import StreamStore
    from .scores import Step

# What a guided codec gets for rows ``start`` to ``stop``.
PerRow = Callable[[int, int], mx.array]


class Guide(ABC):
    """Watches every attention and answers, when rows are sealed, what a ``guided`` codec gets beside them.

    What it remembers lives in the store: per row in ``store.row_aux``, anything else in ``store.aux``.
    ``needs_queries``: it cannot work where the model's attention does not come back to the cache.
    ``survives_drops``: what it saw of the prompt still serves the rows that stay after a policy dropped others.
    """

    needs_queries: bool = True
    survives_drops: bool = False

    @abstractmethod
    def observe(self, store: Store, step: Step) -> None:
        """See one attention over the rows held, before any of them is sealed."""

    @abstractmethod
    def rows(self, store: Store, offset: int, ends: bool) -> PerRow:
        """Asked once before rows are sealed, while all of them are still there: answers for the rows that are due.

        ``offset`` is the number of tokens seen; ``ends``: the first prompt is complete.
        """


def due(rows: StreamStore, ends: bool) -> tuple[int, int]:
    """The first and the last row (exclusive) that the next ``seal`` encodes."""
    first = min(rows.spec.sinks, rows.n) + rows.n_sealed
    return first, first + (rows.of_prompt(ends) or rows.of_codec())


def nothing(start: int, stop: int) -> mx.array:
    """The answer of a guide where no rows are due: nobody may ask."""
    raise AssertionError("no rows were due")
