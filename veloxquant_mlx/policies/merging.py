"""CaM: before a row is dropped, a share of its value is added to the rows that follow it.

Zhang et al., "CaM: Cache Merging for Memory-efficient LLMs Inference", ICML 2024 (PMLR 235).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from ..codecs.base import take_rows
from ..models.rope import Rotation
from .observed import SummedAttention

if TYPE_CHECKING:
    from ..cache.store import Store
    from ..cache.stream import StreamStore

# Rows that a value is spread over, at most; no field exists for it.
WIDTH = 32
LAST = 2**31 - 1


@dataclass(frozen=True)
class NewestWithSums(SummedAttention):
    """Newer rows score higher, the same for all heads; attention is summed per row for others to use."""

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        return store.positions_or_range().astype(mx.float32)


@dataclass(frozen=True)
class Spread:
    """Spreads the value of the oldest row behind the first ``sinks`` over the next rows, ``WIDTH`` at most.

    Weights are equal, or (``similar``) proportional to the positive part of the cosine between the keys; they sum to 1.
    With the ``gate`` a kv head merges with a probability: the row's summed attention over the mean of those rows.
    ``words`` seed it, so that draws depend on layer, head and the tokens seen alone. With ``keys`` their keys move by
    the same weights towards the row's key, turned to their positions by ``rotation``. Sums are made in float32.
    """

    words: tuple[int, int]
    sinks: int
    similar: bool = False
    gate: bool = True
    keys: bool = False
    rotation: Rotation | None = None

    def __call__(self, store: Store, victim: mx.array, step: int) -> None:
        m, positions = min(WIDTH, store.live - 1 - self.sinks), store.positions_or_range()
        # Packed rows lie in the order of their positions, the dropped ones between the sinks and the oldest.
        first = self.sinks + store.dead
        if store.sealed:
            index = mx.arange(first, first + m + 1, dtype=mx.int32)[None, None]
        else:
            age = mx.take_along_axis(positions, victim, axis=-1)
            index = mx.argsort(mx.where(positions < age, LAST, positions), axis=-1)[..., : m + 1].astype(mx.int32)

        def rows(stream: StreamStore) -> mx.array:
            """The victim and the rows after it, ``(B, H, m + 1, D)`` float32."""
            if store.sealed:
                return stream.dense(first, first + m + 1, mx.float32)
            return take_rows(stream.dense(), index).astype(mx.float32)

        values, keys = rows(store.values), None
        weight = mx.full((*values.shape[:2], m), 1 / m)
        if self.keys or self.similar:
            keys = rows(store.keys)
        if self.similar and keys is not None:
            weight = alike(keys)
        if self.gate:
            weight = weight * self._open(store.row_aux["acc"], index, step)
        targets = index[..., 1:]
        store.values.add(targets, weight[..., None] * values[:, :, :1])
        if self.keys and keys is not None:
            moved = mx.broadcast_to(keys[:, :, :1], (*keys.shape[:2], m, keys.shape[3]))
            if self.rotation is not None:
                at = mx.take_along_axis(positions, mx.broadcast_to(index, (*positions.shape[:2], m + 1)), axis=-1)
                moved = self.rotation.turn(moved, at[..., 1:] - at[..., :1])
            store.keys.add(targets, weight[..., None] * (moved - keys[:, :, 1:]))

    def _open(self, acc: mx.array, index: mx.array, step: int) -> mx.array:
        """1 for kv heads ``(B, H, 1)`` that merge, else 0; sequences of one batch share their draws."""
        sums = mx.take_along_axis(acc, mx.broadcast_to(index, (*acc.shape[:2], index.shape[2])), axis=-1)
        own, mean = sums[..., :1], sums[..., 1:].mean(axis=-1, keepdims=True)
        share = mx.where(mean > 0, own / mx.maximum(mean, 1e-30), mx.where(own > 0, 1.0, 0.0))
        key = mx.array([self.words[0], (self.words[1] + step) % 2**32], mx.uint32)
        return (mx.random.uniform(shape=(1, acc.shape[1], 1), key=key) < share).astype(mx.float32)


def alike(keys: mx.array) -> mx.array:
    """Weights ``(B, H, m)`` of rows 1 to m by the cosine to row 0 of ``keys`` ``(B, H, m + 1, D)``; 1/m if none is."""
    norms = mx.sqrt((keys * keys).sum(axis=-1))
    dots = (keys[:, :, 1:] * keys[:, :, :1]).sum(axis=-1)
    cosine = mx.maximum(dots, 0.0) / mx.maximum(norms[..., 1:] * norms[..., :1], 1e-30)
    total = cosine.sum(axis=-1, keepdims=True)
    return mx.where(total > 0, cosine / mx.maximum(total, 1e-30), 1 / cosine.shape[-1])
