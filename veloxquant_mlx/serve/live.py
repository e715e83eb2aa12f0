"""What the caches of running requests hold, asked from other threads and measured in the one that computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from ..cache.batch import CompressedBatchCache
from ..cache.layer import CompressedKVCache


@dataclass(frozen=True)
class Held:
    """Bytes of a set of caches: ours, what 16-bit keys and values of the same tokens take, and mlx_lm's own."""

    compressed: int = 0
    uncompressed: int = 0
    native: int = 0

    @property
    def ratio(self) -> float:
        """How many times smaller than 16-bit; 1.0 where nothing is compressed."""
        return self.uncompressed / self.compressed if self.compressed else 1.0

    def __add__(self, other: Held) -> Held:
        return Held(
            self.compressed + other.compressed, self.uncompressed + other.uncompressed, self.native + other.native
        )


def held(caches: Iterable[Any]) -> Held:
    """The bytes of ``caches``, batches and lists of caches included; constants that they share count once."""
    ours = native = wide = 0
    constants: dict[int, int] = {}
    for cache in _parts(caches):
        if isinstance(cache, CompressedKVCache):
            ours += sum(array.nbytes for array in cache.arrays().values())
            wide += 2 * cache.elements
            constants |= {id(array): array.nbytes for array in cache.constants()}
        else:
            native += 0 if cache.empty() else cache.nbytes
    return Held(ours + sum(constants.values()), wide, native)


def _parts(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        if isinstance(cache, CompressedBatchCache):
            yield from cache.rows
        elif type(cache).__name__ == "CacheList":
            yield from _parts(cache.caches)
        else:
            yield cache


class LiveCaches:
    """The caches with which the model was called and that somebody still holds, stored conversations left out."""

    def __init__(self) -> None:
        self._caches: WeakSet[Any] = WeakSet()
        self._asked, self._told, self._one = threading.Event(), threading.Event(), threading.Lock()
        self._held, self._when = Held(), time.monotonic()

    def watch(self, model: Any) -> None:
        """See the caches of every call of ``model`` from now on."""
        cls = type(model)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            live.note(kwargs.get("cache") or ())
            return cls.__call__(self, *args, **kwargs)

        live = self
        # Python looks __call__ up in the class; the module stays, which tells mlx_lm's models from others.
        model.__class__ = type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})

    def note(self, caches: Iterable[Any]) -> None:
        self.answer()
        self._caches.update(caches)

    def forget(self, caches: Iterable[Any]) -> None:
        """These are stored now."""
        self._caches.difference_update(caches)

    def answer(self) -> None:
        """Measure if somebody asked. Only the thread that computes calls this: nothing changes meanwhile."""
        if self._asked.is_set():
            self._asked.clear()
            self._held, self._when = held(self._caches), time.monotonic()
            self._told.set()

    def measure(self, wait: float = 2.0) -> tuple[Held, float]:
        """What is held and how many seconds ago; older only if no step of the model ended within ``wait`` seconds."""
        with self._one:
            self._told.clear()
            self._asked.set()
            self._told.wait(wait)
            return self._held, time.monotonic() - self._when
