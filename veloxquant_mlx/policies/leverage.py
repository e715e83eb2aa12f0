"""Scores from leverage: how much a token's key row and value row matter to rebuild the key and value matrices.

Sengupta, Chaudhary, Chakraborty, "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
arXiv:2509.15038.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import mlx.core as mx
import numpy as np

from .heads import apart
from .scores import Score

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step

How = Literal["norm", "sketch", "svd"]


@dataclass(frozen=True)
class Leverage(Score):
    """Product of the leverages of a token's key and value.

    ``norm``: squared row norms, each divided by its sum over ``window`` consecutive rows (0: over all rows).
    ``sketch``: the same after a seeded Gaussian projection to ``rank`` columns. ``svd``: leverage of rank ``rank`` by
    the eigenvectors of the Gram matrix, without windows. Windows count stored rows from the first one on; holes count
    as zero rows.
    """

    window: int = 16
    how: How = "norm"
    rank: int = 0
    seed: int = 0

    needs_queries = False

    def observe(self, store: Store, step: Step) -> None:
        """Nothing: everything is known once the prompt is complete."""

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        keys, values = store.keys.dense(), store.values.dense()
        real = mx.broadcast_to(store.positions_or_range() >= 0, keys.shape[:3])[..., None]
        return apart(self._product, keys, values, real)

    def _product(self, keys: mx.array, values: mx.array, real: mx.array) -> mx.array:
        keys, values = (mx.where(real, x.astype(mx.float32), 0.0) for x in (keys, values))
        # The product's sum over a head, by which the paper divides, changes no ranking.
        return self.of(keys) * self.of(values)

    def of(self, x: mx.array) -> mx.array:
        """Leverage ``(B, H, n)`` of the rows of ``x`` ``(B, H, n, D)`` float32."""
        if self.how == "svd":
            return by_svd(x, self.rank)
        if self.how == "sketch":
            x = x @ sketch(x.shape[-1], self.rank, self.seed)
        return by_norm(x, self.window)


def by_norm(x: mx.array, window: int) -> mx.array:
    """Squared norms of rows ``(B, H, n, D)`` over their sum in windows of ``window`` rows (0: in all); 0 / 0 is 0."""
    squares = mx.square(x).sum(axis=-1)
    b, h, n = squares.shape
    window = window or n
    blocks = mx.pad(squares, [(0, 0), (0, 0), (0, -n % window)]).reshape(b, h, -1, window)
    sums = blocks.sum(axis=-1, keepdims=True)
    return (blocks / mx.where(sums > 0, sums, 1.0)).reshape(b, h, -1)[..., :n]


def by_svd(x: mx.array, rank: int) -> mx.array:
    """Leverage of rows ``(B, H, n, D)`` in their ``rank`` strongest directions; those of no energy count nothing."""
    energy, basis = mx.linalg.eigh(x.swapaxes(-1, -2) @ x, stream=mx.cpu)  # ascending
    energy, basis = energy[..., -rank:], basis[..., -rank:]
    # Eigenvalues are good to about 1e-7 of the largest: what is smaller is rounding, not a direction.
    weights = mx.where(energy > 1e-6 * energy[..., -1:], 1 / energy, 0.0)
    return (mx.square(x @ basis) * weights[..., None, :]).sum(axis=-1)


def sketch(dim: int, rank: int, seed: int) -> mx.array:
    """A Gaussian projection ``(dim, r)``, r the smaller of ``rank`` and ``dim``; squared norms keep their mean."""
    rank = min(rank, dim)
    table = np.random.default_rng(seed).normal(size=(dim, rank)) / np.sqrt(rank)
    return mx.array(table.astype(np.float32))
