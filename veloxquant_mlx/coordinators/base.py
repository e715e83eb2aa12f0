"""What a policy does across the layers of one sequence. Coordinators hold nothing: caches remember."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from ..cache.layer import CompressedKVCache
    from ..models.inspect import Slot


class Coordinator(ABC):
    """Sees all layers of one sequence before each forward pass (``attention.forward`` calls it).

    A coordinator is a frozen dataclass of plain numbers: recipes share it between layers, copies and sequences. What
    has to last lives in the caches (``cache.store.aux``, ``cache.life.budget``): that is copied, merged and saved with
    them. What links layers is made anew before every forward.
    """

    def attach(self, model: Any, slots: Sequence[Slot]) -> None:  # noqa: B027
        """Get ``model`` ready in ``for_model``; QuantizerConfigError for a model that does not allow it."""

    def alone(self) -> None:  # noqa: B027
        """A cache is made without any model; QuantizerConfigError where it would be of no use."""

    @abstractmethod
    def before(
        self, model: Any, inputs: mx.array, caches: list[CompressedKVCache], whole: Callable[[], list[Any]]
    ) -> None:
        """The model is about to run on ``inputs``: token ids ``(B, S)``, or ``(B, S, E)`` where it got embeddings.

        ``model`` is the object that was called. ``caches`` are those of this coordinator, in the order of the layers.
        In a batch every sequence comes by itself, without its padding, ``B = 1``. ``whole`` gives the whole cache list
        of the sequence, the model's own caches in it included (out of a batch those are copies).
        """

    def ends(self, caches: list[CompressedKVCache]) -> None:  # noqa: B027
        """The prompt of ``caches``, the layers of the latest forward, is about to be ended by ``end_prefill``."""
