"""Scores that a token's key settles once and for all, the norm among them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from ..codecs.base import take_rows
from .heads import SCRATCH
from .scores import Score

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step

ROWS = "key score"  # what each row was given, in ``store.row_aux``


class KeyScore(Score):
    """A score of the key alone, computed once per token, when it comes in, and kept beside its row.

    Since it never changes, the best rows of any prefix are all that is needed of it: dropping after every token, after
    every chunk and once at the end keep the same rows.
    """

    needs_queries = False

    @abstractmethod
    def of(self, store: Store, keys: mx.array) -> mx.array:
        """Scores ``(B, H, m)`` float32 of ``keys`` ``(B, H, m, D)`` float32."""

    def observe(self, store: Store, step: Step) -> None:
        """Score the rows that are new."""
        keys, index = newest(store, step.queries.shape[2])
        score = self.of(store, keys.astype(mx.float32))
        known = store.row_aux.get(ROWS)
        known = mx.zeros((*score.shape[:2], store.n)) if known is None else known
        store.row_aux[ROWS] = mx.put_along_axis(known, mx.broadcast_to(index, score.shape), score, axis=-1)

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        known = store.row_aux.get(ROWS)
        # Where attention never comes back to the cache nothing is observed: the rows held are scored as they are.
        return self.anew(store) if known is None else known

    def anew(self, store: Store) -> mx.array:
        """Scores of all rows held, some at a time: together their float32 copies would be a second cache."""
        keys, n = store.keys, store.n
        step = max(1, SCRATCH // (4 * keys.batch * keys.heads * keys.dim))
        parts: list[mx.array] = []
        for start in range(0, n, step):
            some = mx.depends([keys.dense(start, min(start + step, n))], parts[-1:])[0]
            parts.append(self.of(store, some.astype(mx.float32)))
        return mx.concatenate(parts, axis=-1)

    def forget(self, store: Store) -> None:
        """Nothing: what stays is scored again."""


def newest(store: Store, m: int) -> tuple[mx.array, mx.array]:
    """Keys ``(B, H, m, D)`` and indices ``(B | 1, H | 1, m)`` of the ``m`` rows that came last."""
    n = store.n
    if m == 1 and store.positions is not None and not store.sealed:  # it may have filled the slot of a dropped row
        slot = mx.argmax(store.positions, axis=-1, keepdims=True)
        return take_rows(store.keys.dense(), slot), slot
    return store.keys.dense(n - m, n), mx.arange(n - m, n)[None, None]


@dataclass(frozen=True)
class KeyNorm(KeyScore):
    """``sign`` times the length of the key, in float32: in half precision most lengths would tie.

    Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv:2406.11430.
    """

    sign: int = -1

    def of(self, store: Store, keys: mx.array) -> mx.array:
        return self.sign * mx.linalg.norm(keys, axis=-1)
