"""Which tokens are salient: attention that a few probe queries pay to them, fairly between old and new tokens.

The saliency of ZipCache (He et al., NeurIPS 2024, arXiv 2405.14256).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .guide import Guide, PerRow, due
from .observed import over_queries, seen, weights

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step


@dataclass(frozen=True)
class ProbeSaliency(Guide):
    """Attention that a row gets from the probes, summed over query heads, over the number of probes that can see it.

    Probes are ``share`` of the rows not sealed yet, drawn by ``seed`` and their positions alone, and as many of the
    newest ones. Both are kept as they come and compared with the keys when rows are sealed, so that the result is that
    of the tokens, however a prompt was fed. A row that no probe can see has saliency 0.

    In the store: ``aux["drawn"]`` and ``aux["newest"]`` are scaled queries ``(B, Hq, m, D)``, ``aux["places"]`` the
    positions of the drawn ones, ``aux["logits"]`` learned sinks. ``row_aux["watched"]`` and ``row_aux["ring"]`` say by
    their lengths alone how many of the newest rows both cover: the store cuts them by every trim.
    """

    share: float = 0.05
    seed: int = 0

    def observe(self, store: Store, step: Step) -> None:
        length, marks, aux = step.queries.shape[2], store.row_aux, store.aux
        start = step.offset - length
        for name in ("watched", "ring"):
            if name not in marks:
                marks[name] = mx.zeros((1, 1, length), mx.uint8)
        watched, ring = (marks[name].shape[-1] for name in ("watched", "ring"))
        queries = (step.queries.astype(mx.float32) * step.scale).astype(step.queries.dtype)
        if step.sinks is not None:
            aux["logits"] = step.sinks
        newest = min(ceil(self.share * watched), ring)
        aux["newest"] = _joined(aux.get("newest"), ring - length, queries)[:, :, -newest:] * 1  # a buffer of its own
        marks["ring"] = mx.zeros((1, 1, newest), mx.uint8)
        old, places = self._drawn(step.offset - watched, start).size, self._drawn(start, step.offset)
        if places.size or ("drawn" in aux and aux["drawn"].shape[2] > old):
            aux["drawn"] = _joined(aux.get("drawn"), old, queries[:, :, mx.array(places - start)])
            aux["places"] = _joined(aux.get("places"), old, mx.array(places)[None, None, :, None])

    def rows(self, store: Store, offset: int, ends: bool) -> PerRow:
        start, stop = due(store.keys, ends)
        if start == stop:
            return _nothing
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
        queries, at = aux["newest"][:, :, :ring], mx.array(newest)
        if drawn := self._drawn(offset - watched, offset).size:
            queries = mx.concatenate([queries, aux["drawn"][:, :, :drawn]], axis=2)
            at = mx.concatenate([at, aux["places"].reshape(-1)[:drawn]])
        positions, sinks = store.positions_or_range()[:, :, None, None], aux.get("logits")

        def weigh(z: mx.array, first: int) -> mx.array:
            allowed = seen(positions, at[first : first + z.shape[3], None])
            paid = (weights(z, allowed, sinks) * allowed)[..., start:stop].sum(axis=(2, 3))
            return mx.stack([paid, mx.broadcast_to(allowed[..., start:stop].sum(axis=(2, 3)), paid.shape)])

        paid, count = over_queries(store, queries, 1.0, weigh, arrays=2)
        return paid / mx.maximum(count, 1)

    def _forget(self, store: Store, offset: int, left: int) -> None:
        """Keep what belongs to the newest ``left`` rows, those that are not sealed now."""
        aux, marks = store.aux, store.row_aux
        watched, ring = self._covered(store)
        watched = min(left, watched)
        sizes = {"watched": watched, "ring": min(ceil(self.share * watched), ring)}
        drawn = self._drawn(offset - watched, offset).size
        for name, size in (("newest", sizes["ring"]), ("drawn", drawn), ("places", drawn)):
            if name in aux:
                aux[name] = aux[name][:, :, -size:] * 1
                if not size:
                    del aux[name]
        for name, size in sizes.items():
            marks[name] = mx.zeros((1, 1, size), mx.uint8)
            if not size:
                del marks[name]
        if not watched:
            aux.pop("logits", None)

    @staticmethod
    def _covered(store: Store) -> tuple[int, int]:
        """How many of the newest rows the drawn and the newest queries cover."""
        lengths = [store.row_aux[name].shape[-1] if name in store.row_aux else 0 for name in ("watched", "ring")]
        return lengths[0], lengths[1]

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


def _nothing(start: int, stop: int) -> mx.array:
    raise AssertionError("no rows were due")
