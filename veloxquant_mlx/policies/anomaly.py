"""Scores from anomaly: how much a key differs from its surroundings at three nested time scales.

Chen et al., "NestedKV: Nested Memory Routing for Long-Context KV Cache Compression", arXiv:2605.26678.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from .heads import apart
from .scores import Score

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step

# How the scales (prompt, block, window) are mixed where they tell tokens apart equally well.
PRIOR = (0.4, 0.4, 0.2)
# Share of the tokens whose mean anomaly makes the upper and the lower end of a scale's gap.
TENTH = 0.1
# Cosines are good to a few 2^-24: a smaller spread is rounding and ranks nothing.
NOISE = 1e-6


@dataclass(frozen=True)
class Anomaly(Score):
    """Cosine anomaly of keys against the mean key of the prompt, of a block and of the last ``window`` rows.

    Every scale is brought to [0, 1] per head. Scales are mixed by how well they tell tokens apart (``beta``); where
    they disagree about a token, a sigmoid (centre ``tau``, slope ``kappa``) moves its score to the largest of the
    three.
    """

    window: int
    beta: float
    tau: float
    kappa: float

    needs_queries = False

    def observe(self, store: Store, step: Step) -> None:
        """Nothing: everything is known once the prompt is complete."""

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        keys = store.keys.dense()
        real = mx.broadcast_to(store.positions_or_range() >= 0, keys.shape[:3])
        return apart(lambda x, rows: self.of(x.astype(mx.float32), rows[..., 0]), keys, real[..., None])

    def of(self, keys: mx.array, real: mx.array) -> mx.array:
        """Scores ``(B, H, n)`` in [0, 1] of ``keys`` ``(B, H, n, D)`` float32; only ``real`` rows take part."""
        count = real.sum(axis=-1, keepdims=True)
        scales = mx.stack([_spread(-cosine, real) for cosine in cosines(unit(keys) * real[..., None], self.window)])
        gaps = mx.stack([_gap(scale, real, count) for scale in scales])
        prior = mx.log(mx.array(PRIOR)).reshape(-1, *[1] * (gaps.ndim - 1))
        blend = (mx.softmax(prior + self.beta * gaps, axis=0) * scales).sum(axis=0)
        surprise = _spread(mx.sqrt(mx.var(scales, axis=0)), real)
        surprise = surprise - surprise.sum(axis=-1, keepdims=True) / count
        follow = mx.sigmoid(self.kappa * (surprise - self.tau))
        return (1 - follow) * blend + follow * scales.max(axis=0)


def block_length(n: int) -> int:
    """Rows per block of the middle scale for ``n`` rows."""
    return min(max(n // 32, 128), 256)


def unit(x: mx.array) -> mx.array:
    """Rows of ``x`` ``(..., D)`` at length 1; zero rows stay zero."""
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def cosines(x: mx.array, window: int) -> list[mx.array]:
    """Cosines ``(B, H, n)`` of rows ``(B, H, n, D)`` with the sums over all rows, their block, their last ``window``.

    ``x`` has rows of length 1, and zero rows where nothing counts.
    """
    n = x.shape[2]
    blocks = _split(x, block_length(n))
    whole = x @ unit(x.sum(axis=2, keepdims=True)).swapaxes(-1, -2)
    block = blocks @ unit(blocks.sum(axis=3, keepdims=True)).swapaxes(-1, -2)
    recent = (x * unit(window_sums(x, window))).sum(axis=-1)
    return [whole[..., 0], block.reshape(*x.shape[:2], -1)[..., :n], recent]


def window_sums(x: mx.array, window: int) -> mx.array:
    """Sums ``(B, H, n, D)`` over rows ``j - window + 1`` to ``j``.

    Prefix sums start anew every ``window`` rows, so that rounding does not grow with the length of the prompt.
    """
    parts = _split(x, window)
    prefix = mx.cumsum(parts, axis=3)
    rest = (prefix[..., -1:, :] - prefix)[:, :, :-1]
    before = mx.pad(rest, [(0, 0), (0, 0), (1, 0), (0, 0), (0, 0)])
    return (prefix + before).reshape(*x.shape[:2], -1, x.shape[3])[:, :, : x.shape[2]]


def _split(x: mx.array, size: int) -> mx.array:
    """``(B, H, n, D)`` as ``(B, H, m, size, D)``, the last block filled up with zero rows."""
    b, h, n, d = x.shape
    return mx.pad(x, [(0, 0), (0, 0), (0, -n % size), (0, 0)]).reshape(b, h, -1, size, d)


def _spread(x: mx.array, real: mx.array) -> mx.array:
    """``x`` ``(B, H, n)`` brought to [0, 1] over the real rows of each head; constant rows and holes are 0."""
    low = mx.where(real, x, mx.inf).min(axis=-1, keepdims=True)
    high = mx.where(real, x, -mx.inf).max(axis=-1, keepdims=True)
    span = high - low
    return mx.where(real & (span > NOISE), (x - low) / mx.where(span > NOISE, span, 1.0), 0.0)


def _gap(x: mx.array, real: mx.array, count: mx.array) -> mx.array:
    """Mean of the largest tenth of the real entries less that of the smallest, ``(B, H, 1)``."""
    tenth = mx.maximum(mx.round(TENTH * count), 1.0)
    inside = mx.arange(x.shape[-1]) < tenth
    top, bottom = (mx.sort(mx.where(real, sign * x, mx.inf), axis=-1) for sign in (-1.0, 1.0))
    return mx.where(inside, -top - bottom, 0.0).sum(axis=-1, keepdims=True) / tenth
