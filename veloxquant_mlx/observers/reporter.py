"""How a cache tells its observers what it did."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from ..core.abstractions import QuantizationObserver
from .events import QuantizationEvent


class Holds(Protocol):
    """Something whose bytes can be counted: the store of a cache."""

    def arrays(self) -> Mapping[str, mx.array]: ...


class Begun(NamedTuple):
    """The bytes held and the time when a piece of work began."""

    held: int
    at: float


class Reporter:
    """Tells ``observers`` of every piece of work of one cache.

    They see real times: with any attached, every event waits for the device. Without any, nothing is done.
    """

    def __init__(self, observers: Sequence[QuantizationObserver], method: str, layer: int) -> None:
        self._observers, self._method, self._layer = observers, method, layer

    def begin(self, store: Holds) -> Begun | None:
        """To be handed to ``tell`` when the work is done; None where nobody listens."""
        return Begun(_held(store), time.perf_counter()) if self._observers else None

    def tell(self, stage: str, rows: int, begun: Begun | None, store: Holds, offset: int) -> None:
        """One event: ``rows`` rows were worked on since ``begun``, with ``offset`` tokens seen."""
        if begun is None:
            return
        mx.eval(list(store.arrays().values()))
        event = QuantizationEvent(
            stage=stage,
            input_shape=(rows,),
            elapsed_ms=(time.perf_counter() - begun.at) * 1e3,
            memory_delta_bytes=_held(store) - begun.held,
            metadata={"method": self._method, "layer": self._layer, "offset": offset},
        )
        for observer in self._observers:
            observer.on_event(event)


def _held(store: Holds) -> int:
    return sum(a.nbytes for a in store.arrays().values())
