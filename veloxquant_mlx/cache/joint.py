"""Layers that are packed together: rows stay floats in every layer until the last one of the group has them too.

Each layer has a cache of its own. What a group shares is one set of arrays, which the first cache counts and saves;
the streams of the others refer to it. A copy, a batch's row or a loaded file is made layer by layer: then each cache
holds its own arrays only, until ``link`` puts a group together again. That happens before every forward pass
(``coordinators.joint``), where it is known which caches belong to one sequence.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..coordinators.joint import Joint
from ..core.exceptions import CacheStateError

if TYPE_CHECKING:
    from .layer import CompressedKVCache
    from .stream import StreamStore

_TENSORS = ("keys", "values")


def peers(cache: CompressedKVCache) -> list[CompressedKVCache]:
    """The caches of the group of ``cache``, in the order of the layers; empty where they are not known."""
    found = [peer for ref in cache.peers if (peer := ref()) is not None]
    return found if len(found) == cache.store.together else []


def link(caches: Sequence[CompressedKVCache]) -> None:
    """Let every cache of a group read what they share, and forget what all of them have trimmed."""
    offsets = {cache.offset for cache in caches}
    if len(offsets) > 1:
        raise CacheStateError(
            f"layers that are packed together hold {sorted(offsets)} tokens; it must be one number. Trim all caches of "
            "a list alike, and copy or save them together."
        )
    for name in _TENSORS:
        _link([getattr(cache.store, name) for cache in caches])
    _truncate(caches)


def meet(caches: Sequence[CompressedKVCache]) -> None:
    """Put the groups among the caches of one sequence together, outside a forward pass."""
    groups: dict[Joint, list[CompressedKVCache]] = {}
    for cache in caches:
        if isinstance(cache.coordinator, Joint):
            groups.setdefault(cache.coordinator, []).append(cache)
    for group in groups.values():
        refs = tuple(weakref.ref(cache) for cache in group)
        for cache in group:
            cache.peers = refs
        link(group)


def _link(streams: Sequence[StreamStore]) -> None:
    blocks = [stream.packed for stream in streams if stream.packed is not None]
    first = blocks[0] if blocks else None
    if first is None or all(b.codes is first.codes and b.fitted is first.fitted and b.n == first.n for b in blocks):
        return
    if len({block.n for block in blocks}) > 1:
        raise CacheStateError(
            f"layers that are packed together hold {[block.n for block in blocks]} packed rows; it must be one number. "
            "Copies and files of a group must be made at the same moment."
        )
    codes, fitted = (
        {name: a for block in blocks for name, a in arrays(block).items() if block.spec.owns(name)}
        for arrays in (lambda block: block.codes, lambda block: block.fitted)
    )
    for block in blocks:
        block.codes = codes
        block.fit(fitted)


def settle(cache: CompressedKVCache) -> bool:
    """Pack the rows that all layers of the group have, once each has said so; returns whether that is now.

    A layer with attention code of its own settles with its next rows: where others do so at once, they may be ahead.
    """
    caches = peers(cache)
    ready = [cache.store.numbers.get("ready", -1) for cache in caches]
    if not ready or min(ready) < 0:
        return False
    first, *others = caches
    ends = all(cache.store.numbers["ends"] for cache in caches)
    n = min(ready)
    for cache, rows in zip(caches, ready, strict=True):
        if rows == n:
            del cache.store.numbers["ready"], cache.store.numbers["ends"]
    for name in _TENSORS:
        _link([getattr(cache.store, name) for cache in caches])
    begun = [cache.life.reporter.begin(cache.store) for cache in caches]
    rows = sum(
        getattr(first.store, name).seal(
            ends=ends, others=[getattr(other.store, name) for other in others], n=n, most=first.life.most
        )
        for name in _TENSORS
    )
    if rows:
        for each, start in zip(caches, begun, strict=True):
            each.life.reporter.tell("encode", rows, start, each.store, each.offset)
    return True


def trim(cache: CompressedKVCache) -> None:
    """``cache`` was trimmed: what the group shares is cut once all of its layers were."""
    store = cache.store
    for name in ("ready", "ends"):
        store.numbers.pop(name, None)
    if all(cache.offset >= s.sinks.n + s.n_sealed for s in (store.keys, store.values)):
        store.truncate(cache.offset)
        return
    caches = peers(cache)
    if caches and all(peer.offset == cache.offset for peer in caches):
        link(caches)


def _truncate(caches: Sequence[CompressedKVCache]) -> None:
    if all(cache.store.n == cache.offset for cache in caches):
        return
    for cache in caches:  # each decodes what it gets back before the arrays of the group are cut
        cache.store.truncate(cache.offset)
    for name in _TENSORS:
        _link([getattr(cache.store, name) for cache in caches])


def linked(cache: CompressedKVCache) -> bool:
    """Whether the arrays of its group are at hand: not so after a copy or a load of this cache alone."""
    blocks = [stream.packed for stream in (cache.store.keys, cache.store.values) if stream.packed is not None]
    return all(not block.n or block.codec.layout.keys() <= block.codes.keys() for block in blocks)


def check(cache: CompressedKVCache, rows: int) -> None:
    """``rows`` tokens come to ``cache``: the layers before it must have them already, those after it not yet."""
    caches, seen = peers(cache), cache.offset
    at = next((i for i, peer in enumerate(caches) if peer is cache), None)
    if at is None or any(peer.offset != seen + rows * (i < at) for i, peer in enumerate(caches)):
        raise CacheStateError(
            f"layer {cache.layer.index} is packed together with others, whose caches were not called with it. Call the "
            "model with the whole list of caches, after KVCacheBuilder.for_model(model, config) or attach(model) has "
            "prepared it in this process."
        )
