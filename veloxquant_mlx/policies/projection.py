"""Scores by projection on a filter: the direction that nearly all queries of a head point in.

Godey et al., "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", arXiv:2503.02812.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from ..core.exceptions import QuantizerConfigError
from .eviction import Eviction
from .norms import ROWS, KeyScore

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step

# What ``store.aux`` holds of a sequence: its sampled queries, then its filters; and that it was reported.
QUERIES, FILTERS, TOLD = "queries", "filters", "told"


@dataclass(frozen=True)
class Projection(KeyScore):
    """``sign`` times the product of a key with the filter of its head; ``filters`` ``(H, D)`` float32."""

    filters: mx.array
    sign: int = 1

    def of(self, store: Store, keys: mx.array) -> mx.array:
        return self.sign * project(keys, self.filters[None])


@dataclass(frozen=True)
class FittedProjection(KeyScore):
    """The same with filters from the real queries of this very sequence.

    They are fitted when rows must be dropped for the first time, on at least ``sample`` queries (all, where fewer came)
    at even distances; from then on they stay. Until then the sample is held.
    """

    sample: int
    sign: int = 1

    needs_queries = True

    def of(self, store: Store, keys: mx.array) -> mx.array:
        return self.sign * project(keys, store.aux[FILTERS])

    def observe(self, store: Store, step: Step) -> None:
        if FILTERS in store.aux:
            super().observe(store, step)
        else:
            store.aux[QUERIES] = thinned(store.aux.get(QUERIES), step.queries, step.offset, self.sample)

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        if FILTERS not in store.aux:
            store.aux[FILTERS] = fit(store.aux.pop(QUERIES), store.keys.heads)
            store.row_aux[ROWS] = self.anew(store)
        return super().score(store, scale, sinks)


@dataclass(frozen=True)
class WatchedEviction(Eviction):
    """Says, once per sequence, that fewer than ``floor`` of its tokens are held, right after rows were dropped.

    ``how``: by a warning, or by QuantizerConfigError (the rows are gone then).
    """

    floor: float = 0.0
    how: Literal["warn", "raise"] = "warn"

    def drop(
        self, store: Store, offset: int, prompt: bool, scale: float, sinks: mx.array | None, budget: int | None = None
    ) -> int:
        dropped = super().drop(store, offset, prompt, scale, sinks, budget)
        if dropped and store.live < self.floor * offset and TOLD not in store.aux:
            store.aux[TOLD] = mx.array([1], mx.uint8)
            self._tell(store.live, offset)
        return dropped

    def _tell(self, kept: int, seen: int) -> None:
        message = (
            f"qfilters_budget={self.budget} keeps {kept} of {seen} tokens, less than qfilters_min_retention="
            f"{self.floor}. Raise the budget, lower that floor, or set qfilters_on_low_retention='ignore'."
        )
        if self.how == "raise":
            raise QuantizerConfigError(message)
        warnings.warn(message, UserWarning, stacklevel=2)


def project(keys: mx.array, filters: mx.array) -> mx.array:
    """Products ``(B, H, n)`` of ``keys`` ``(B, H, n, D)`` with ``filters`` ``(B | 1, H, D)``."""
    # Not a matrix product: its sums may depend on how many rows come at once.
    return (keys * filters[:, :, None]).sum(axis=-1)


def fit(queries: mx.array, kv_heads: int) -> mx.array:
    """Filters ``(B, H, D)`` float32 of real ``queries`` ``(B, Hq, M, D)``.

    Per query head the first right singular vector, not centred, turned to the side where more than half of the queries
    lie; then the mean over the query heads of a kv head. The decomposition runs on the CPU; nothing waits for it.
    """
    x = queries.astype(mx.float32)
    b, hq, m, d = x.shape
    _, basis = mx.linalg.eigh(x.swapaxes(-1, -2) @ x, stream=mx.cpu)  # ascending
    top = basis[..., -1:]
    ahead = (x @ top > 0).sum(axis=2, keepdims=True)
    turned = mx.where(2 * ahead > m, top, -top)
    return turned.reshape(b, kv_heads, hq // kv_heads, d).mean(axis=2)


def thinned(held: mx.array | None, new: mx.array, seen: int, sample: int) -> mx.array:
    """Queries ``(B, Hq, m, D)`` at even distances from token 0 on; ``seen`` tokens came, ``new`` among them.

    The distance is the smallest power of two that leaves at most ``2 * sample``: whatever the chunks, the same queries.
    """
    before = seen - new.shape[2]
    old, step = _distance(before, sample), _distance(seen, sample)
    fresh = new[:, :, -before % step :: step]
    parts = [fresh] if held is None else [held[:, :, :: step // old], fresh]
    return mx.concatenate(parts, axis=2) * 1  # own buffer: a slice would hold the whole chunk


def _distance(seen: int, sample: int) -> int:
    step = 1
    while -(-seen // step) > 2 * sample:
        step *= 2
    return step
