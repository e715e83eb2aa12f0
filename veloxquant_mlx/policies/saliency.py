"""Which tokens are salient: attention that a few probe queries pay to them, fairly between old and new tokens.

The saliency of ZipCache (He et al., NeurIPS 2024, arXiv 2405.14256).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .guide import Guide, PerRow, due, nothing
from .observed import over_queries, seen, weights

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step

NEWEST, DRAWN, PLACES, LOGITS = ("guide.newest", "guide.drawn", "guide.places", "guide.logits")
WATCHED, RING = "guide.watched", "guide.ring"


@dataclass(frozen=True)
class ProbeSaliency(Guide):
    """Attention that a row gets from the probes, summed over query heads, over the number of probes that can see it.

    Probes are ``share`` of the rows not sealed yet, drawn by ``seed`` and their positions alone, and as many of the
    newest ones. Both are kept as they come and compared with the keys when rows are sealed, so that the result is that
    of the tokens, however a prompt was fed. A row that no probe can see has saliency 0.

    In the store: ``DRAWN`` and ``NEWEST`` are scaled queries ``(B, Hq, m, D)``, ``PLACES`` the
    positions of the drawn ones, ``LOGITS`` learned sinks. ``WATCHED`` and ``RING`` in ``row_aux`` say by their
    lengths alone how many of the newest rows both cover: the store cuts them by every trim.
    """

    survives_drops = True

    share: float = 0.05
    seed: int = 0

    def observe(self, store: Store, step: Step) -> None:
        length, aux = step.queries.shape[2], store.aux
        start = step.offset - length
        watched, ring = self._covered(store, length)
        queries = (step.queries.astype(mx.float32) * step.scale).astype(step.queries.dtype)
        if step.sinks is not None:
            aux[LOGITS] = step.sinks
        newest = min(ceil(self.share * watched), ring)
        aux[NEWEST] = _joined(aux.get(NEWEST), ring - length, queries)[:, :, -newest:] * 1  # a buffer of its own
        self._cover(store, watched, newest)
        old, places = self._drawn(step.offset - watched, start).size, self._drawn(start, step.offset)
        if places.size or (DRAWN in aux and aux[DRAWN].shape[2] > old):
            aux[DRAWN] = _joined(aux.get(DRAWN), old, queries[:, :, mx.array(places - start)])
            aux[PLACES] = _joined(aux.get(PLACES), old, mx.array(places)[None, None, :, None])

    def rows(self, store: Store, offset: int, ends: bool) -> PerRow:
        start, stop = due(store.keys, ends)
        if start == stop:
            return nothing
        saliency = self._saliency(store, offset, start, stop)
        self._forget(store, offset, store.n - stop)
        return lambda first, last: saliency[..., first - start : last - start]

    def _saliency(self, store: Store, offset: int, start: int, stop: int) -> mx.array:
        """Of rows ``start`` to ``stop``: float32 ``(B, H, stop - start)``."""
        aux, (watched, ring) = store.aux, self._covered(store)
        if not ring:
            return mx.zeros((store.keys.batch, store.keys.heads, stop - start))
        newest = np.arange(offset - ring, offset, dtype=np.int32)
        newest[np.isin(newest, self._drawn(offset - ring, offset))] = -1  # they are among the drawn ones
        queries, at = aux[NEWEST][:, :, :ring], mx.array(newest)
        if drawn := self._drawn(offset - watched, offset).size:
            queries = mx.concatenate([queries, aux[DRAWN][:, :, :drawn]], axis=2)
            at = mx.concatenate([at, aux[PLACES].reshape(-1)[:drawn]])
        positions, sinks = store.positions_or_range()[:, :, None, None], aux.get(LOGITS)

        def weigh(z: mx.array, first: int) -> mx.array:
            allowed = seen(positions, at[first : first + z.shape[3], None])
            paid = (weights(z, allowed, sinks) * allowed)[..., start:stop].sum(axis=(2, 3))
            return mx.stack([paid, mx.broadcast_to(allowed[..., start:stop].sum(axis=(2, 3)), paid.shape)])

        paid, count = over_queries(store, queries, 1.0, weigh, arrays=2)
        return paid / mx.maximum(count, 1)

    def _forget(self, store: Store, offset: int, left: int) -> None:
        """Keep what belongs to the newest ``left`` rows, those that are not sealed now."""
        aux = store.aux
        watched, ring = self._covered(store)
        watched = min(left, watched)
        ring = min(ceil(self.share * watched), ring)
        drawn = self._drawn(offset - watched, offset).size
        for name, size in ((NEWEST, ring), (DRAWN, drawn), (PLACES, drawn)):
            if name in aux:
                aux[name] = aux[name][:, :, -size:] * 1
                if not size:
                    del aux[name]
        self._cover(store, watched, ring)
        if not watched:
            aux.pop(LOGITS, None)

    @staticmethod
    def _covered(store: Store, new: int = 0) -> tuple[int, int]:
        """How many of the newest tokens the drawn and the newest queries cover; ``new`` came since the last call.

        Trims cut the marks; once rows were dropped no trim can happen, and the numbers count.
        """
        if store.positions is not None:
            return store.numbers.get(WATCHED, 0) + new, store.numbers.get(RING, 0) + new
        watched, ring = (store.row_aux[n].shape[-1] if n in store.row_aux else new for n in (WATCHED, RING))
        return watched, ring

    @staticmethod
    def _cover(store: Store, watched: int, ring: int) -> None:
        for name, size in ((WATCHED, watched), (RING, ring)):
            store.numbers[name] = size
            store.row_aux.pop(name, None)
            if size and store.positions is None:
                store.row_aux[name] = mx.zeros((1, 1, size), mx.uint8)

    def _drawn(self, start: int, stop: int) -> np.ndarray:
        """Positions from ``start`` to ``stop`` that are drawn: a hash of seed and position (splitmix64) says which."""
        x = np.arange(start, stop, dtype=np.uint64) + np.uint64((self.seed * 0xD1B54A32D192ED03 + 1) % 2**64)
        x *= np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (start + np.flatnonzero((x ^ (x >> np.uint64(31))) < np.uint64(self.share * 2**64))).astype(np.int32)


def _joined(old: mx.array | None, keep: int, new: mx.array) -> mx.array:
    """The first ``keep`` rows of ``old`` and then ``new``, both ``(B, H, n, D)``."""
    return mx.concatenate([old[:, :, :keep], new], axis=2) if old is not None and keep > 0 else new
