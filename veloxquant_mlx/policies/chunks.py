"""Chunks of neighbouring tokens are kept or dropped as a whole; all heads of a layer keep the same ones.

Liu et al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
arXiv:2502.00299.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

from .norms import KeyNorm
from .scores import Score

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step


@dataclass(frozen=True)
class HeadMean(Score):
    """The mean over the kv heads of what ``score`` says: ``(B, 1, n)``."""

    inner: Score

    def observe(self, store: Store, step: Step) -> None:
        self.inner.observe(store, step)

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        return self.inner.score(store, scale, sinks).mean(axis=1, keepdims=True)


@dataclass(frozen=True)
class ShortKeys(Score):
    """Minus the mean length of a token's keys over the kv heads, ``(B, 1, n)``, from the rows as they are held."""

    needs_queries = False

    def observe(self, store: Store, step: Step) -> None:
        """Nothing: keys say it all, and are there when it is asked for."""

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        return KeyNorm().of(store, store.keys.dense(dtype=mx.float32)).mean(axis=1, keepdims=True)


class Choice(NamedTuple):
    """What was kept of ``n`` rows, and which of it is no padding."""

    n: int
    rows: mx.array
    valid: mx.array | None


class Shared:
    """One choice for several layers in one forward: the first layer makes it."""

    choice: Choice | None = None


# The layers that share a choice in the forward that runs now. Weak: nothing here outlives a cache, and copies of a
# cache are not in it. A layer leaves once it has chosen.
_shared: weakref.WeakKeyDictionary[Store, Shared] = weakref.WeakKeyDictionary()


def share(stores: list[Store]) -> None:
    """Let these layers, in order, keep the same rows at their next cut."""
    one = Shared()
    for store in stores:
        _shared[store] = one


@dataclass(frozen=True)
class Chunks:
    """Keeps the protected rows and the best chunks of ``size`` rows between ``sinks`` and those.

    Chunks lie on a grid of positions that starts after the sinks, and end where positions jump because rows in between
    were dropped before. They are taken by their mean score, ties by age, until the next one does not fit: up to
    ``size - 1`` rows of the budget stay unused. Waits for the device: only for the end of a prompt.
    """

    size: int
    sinks: int

    def __call__(self, store: Store, score: mx.array, budget: int) -> tuple[mx.array, mx.array | None]:
        shared = _shared.pop(store, None)
        if shared is not None and shared.choice is not None and shared.choice.n == store.n:
            return shared.choice.rows, shared.choice.valid
        index, valid = self.of(score, store.positions_or_range(), budget)
        if shared is not None and shared.choice is None:
            shared.choice = Choice(store.n, index, valid)
        return index, valid

    def of(self, score: mx.array, positions: mx.array, budget: int) -> tuple[mx.array, mx.array | None]:
        """Ascending rows ``(B, 1, m)`` of ``score`` ``(B, 1, n)`` at ``positions`` ``(B | 1, 1, n)``.

        Infinite scores mark rows that are always kept, minus infinity those that are holes. Sequences of a batch may
        keep different numbers of rows: the second value then says which are no padding.
        """
        scores = np.array(score[:, 0].astype(mx.float32))
        where = np.broadcast_to(np.array(positions[:, 0]), scores.shape)
        kept = [self._one(s, p, budget) for s, p in zip(scores, where, strict=True)]
        width = max(map(len, kept))
        index = mx.array(np.stack([np.pad(rows, (0, width - len(rows))) for rows in kept]).astype(np.int32))[:, None]
        if all(len(rows) == width for rows in kept):
            return index, None
        return index, mx.arange(width) < mx.array([[[len(rows)]] for rows in kept])

    def _one(self, score: np.ndarray, positions: np.ndarray, budget: int) -> np.ndarray:
        """The rows that one sequence keeps."""
        protected, body = np.flatnonzero(score == np.inf), np.flatnonzero(np.isfinite(score))
        at = positions[body]
        new = (np.diff(at, prepend=-2) != 1) | ((at - self.sinks) % self.size == 0)
        starts = np.flatnonzero(new)
        sizes = np.diff(np.append(starts, len(body)))
        means = np.add.reduceat(score[body].astype(np.float64), starts) / sizes
        best = np.argsort(-means, kind="stable")
        chosen = np.zeros(len(starts), bool)
        chosen[best] = np.cumsum(sizes[best]) <= budget - len(protected)
        return np.sort(np.concatenate([protected, body[np.repeat(chosen, sizes)]]))
