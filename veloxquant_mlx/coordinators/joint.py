"""Which layers are packed together: every forward pass makes the caches of a group known to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..core.exceptions import CacheStateError
from .base import Coordinator

if TYPE_CHECKING:
    from ..cache.layer import CompressedKVCache


@dataclass(frozen=True)
class Joint(Coordinator):
    """The ``members`` caches of ``group``; what they share is held by the first (``cache.joint``)."""

    group: int
    members: int

    def before(
        self, model: Any, inputs: mx.array, caches: list[CompressedKVCache], whole: Callable[[], list[Any]]
    ) -> None:
        from ..cache import joint  # which imports what imports this module

        if len(caches) != self.members:
            raise CacheStateError(
                f"{len(caches)} caches of a group of {self.members} layers came to one forward pass; they are packed "
                "together and must be used together. Pass the whole list that for_model made."
            )
        joint.link(caches)
