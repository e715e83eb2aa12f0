"""The newest queries of a sequence, remembered in its store so that trims and dropped rows leave them right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from ..cache.store import Store

RING = "ring"


def remember(store: Store, queries: mx.array, most: int, name: str) -> None:
    """Hold the newest ``most`` queries in ``store.aux[name]`` ``(B, Hq, m, D)``; ``queries`` are those of new rows.

    A mark in ``row_aux`` says by its length how many of the newest rows have theirs: the store cuts it by every trim.
    """
    mark = f"{RING}.{name}"
    ring = store.row_aux[mark].shape[-1] - queries.shape[2] if mark in store.row_aux else 0
    if ring > 0:
        queries = mx.concatenate([store.aux[name][:, :, :ring], queries], axis=2)
    store.aux[name] = queries[:, :, -most:] * 1  # own buffer: a slice would hold the whole chunk
    store.row_aux[mark] = mx.zeros((1, 1, store.aux[name].shape[2]), mx.uint8)


def forget(store: Store, *names: str) -> None:
    """Free what ``remember`` holds under these names."""
    for name in names:
        store.aux.pop(name, None)
        store.row_aux.pop(f"{RING}.{name}", None)
