"""The seam before a model's layers run: coordinators see the caches of all layers (``coordinators.base``).

``install`` wraps ``__call__`` of the class of a model, once. The wrapper acts on what the cache list of a call holds
and on nothing else: without a compressed cache whose method asks for a coordinator the call goes through untouched.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

if TYPE_CHECKING:
    from ..cache.layer import CompressedKVCache
    from ..coordinators.base import Coordinator

_EMBEDDINGS = ("input_embeddings", "inputs_embeds", "input_embeds")

_lock = threading.RLock()
# Per class its own ``__call__`` (None: inherited), what replaced it, and the names of the wrappers in that.
_originals: weakref.WeakKeyDictionary[type, tuple[Callable | None, Callable, tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)
_running = threading.local()


class Parameter(NamedTuple):
    """A parameter of a method: its ``names``, and its place after ``self`` (None: only by name)."""

    names: tuple[str, ...]
    place: int | None

    @classmethod
    def of(cls, function: Callable, *names: str) -> Parameter:
        """The parameter of ``function`` that has one of ``names``."""
        order = list(inspect.signature(function).parameters)[1:]
        return cls(names, next((i for i, name in enumerate(order) if name in names), None))

    def value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its value in one call, None where it was not given."""
        if self.place is not None and self.place < len(args):
            return args[self.place]
        return next((kwargs[name] for name in self.names if name in kwargs), None)


class Share(NamedTuple):
    """One sequence of a call: its ``row`` in the batch, its tokens and its caches in the order of the layers.

    ``whole`` gives the whole cache list of the sequence; the model's own caches of a batch are copied for it.
    """

    row: slice
    tokens: slice
    caches: list[CompressedKVCache]
    whole: Callable[[], list[Any]]


def shares(entries: list[Any], length: int) -> Iterator[Share]:
    """The sequences among cache ``entries`` with tokens in a call of ``length`` tokens, before the caches see it."""
    from ..cache.batch import CompressedBatchCache
    from ..cache.layer import CompressedKVCache

    single = [c for c in entries if isinstance(c, CompressedKVCache)]
    if single:
        yield Share(slice(None), slice(None), single, lambda: list(entries))
    batches = [c for c in entries if isinstance(c, CompressedBatchCache)]
    for i, tokens in enumerate(batches[0].shares(length) if batches else []):
        if tokens.start < tokens.stop:
            yield Share(slice(i, i + 1), tokens, [batch.rows[i] for batch in batches], partial(_row, entries, i))


def _row(entries: list[Any], i: int) -> list[Any]:
    from ..cache.batch import CompressedBatchCache

    return [e.rows[i] if isinstance(e, CompressedBatchCache) else e.extract(i) for e in entries]


def running() -> list[Share]:
    """The sequences of the forward that this thread is in, as far as a cache among theirs asks for that."""
    return getattr(_running, "now", None) or []


def coordinate(model: Any, inputs: mx.array, sequences: list[Share]) -> None:
    """Let the coordinators of the caches in ``sequences`` act before ``model`` runs on ``inputs`` ``(B, S, ...)``."""
    for row, tokens, caches, whole in sequences:
        groups: dict[Coordinator, list[CompressedKVCache]] = {}
        for cache in caches:
            if cache.coordinator is not None:
                groups.setdefault(cache.coordinator, []).append(cache)
        for coordinator, mine in groups.items():
            peers = tuple(weakref.ref(c) for c in mine)
            for cache in mine:
                cache.peers = peers
            coordinator.before(model, inputs[row, tokens], mine, whole)


def wrap(cls: type, wrapper: Callable[[Callable], Callable], name: str) -> None:
    """Replace ``cls.__call__`` by ``wrapper`` of it, unless that was done before under this ``name``."""
    with _lock:
        own, names, known = cls.__dict__.get("__call__"), (), _originals.get(cls)
        if known is not None and own is known[1]:
            own, _, names = known
        if name in names:
            return
        original = cls.__call__
        replaced = functools.wraps(original)(wrapper(original))
        _originals[cls] = own, replaced, (*names, name)
        cls.__call__ = replaced  # type: ignore[method-assign]


def _coordinated(original: Callable) -> Callable:
    cache, embeddings = Parameter.of(original, "cache"), Parameter.of(original, *_EMBEDDINGS)
    first = Parameter(tuple(list(inspect.signature(original).parameters)[1:2]), 0)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        entries = cache.value(args, kwargs)
        # A model inside this one sees the same caches: one forward is coordinated once.
        if not isinstance(entries, (list, tuple)) or running() or not any(map(_asks, entries)):
            return original(self, *args, **kwargs)
        inputs = embeddings.value(args, kwargs)
        inputs = first.value(args, kwargs) if inputs is None else inputs
        sequences = list(shares(list(entries), inputs.shape[1]))
        coordinate(self, inputs, sequences)  # not running yet: a pass that a coordinator makes is no forward of theirs
        _running.now = sequences
        try:
            return original(self, *args, **kwargs)
        finally:
            _running.now = None

    return __call__


def _asks(entry: Any) -> bool:
    caches = getattr(entry, "rows", (entry,))
    return any(getattr(c, "coordinator", None) is not None or getattr(c, "protected", 0) for c in caches)


def install(*models: Any) -> None:
    """Let coordinators see every forward of ``models`` (of their classes); a second time changes nothing."""
    for model in models:
        wrap(type(model), _coordinated, "coordinators")


def uninstall() -> int:
    """Give every class that still has one of our wrappers its own ``__call__`` back; returns how many that were."""
    with _lock:
        restored = 0
        for cls, (original, replaced, _) in list(_originals.items()):
            if cls.__dict__.get("__call__") is not replaced:
                continue
            if original is None:
                del cls.__call__
            else:
                cls.__call__ = original  # type: ignore[method-assign]
            restored += 1
        _originals.clear()
        return restored
