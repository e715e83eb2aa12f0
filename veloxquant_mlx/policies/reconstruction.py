"""Pairs that a model reads while it repeats its own context, and which of them stay, across layers and heads.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", arXiv:2505.23416.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import mlx.core as mx
import numpy as np

from ..attention import masks, reference
from ..core.exceptions import CacheStateError
from .heads import SCRATCH
from .scores import Score, Step

if TYPE_CHECKING:
    from ..cache.store import Store

# Query rows that are scored at a time, fewer where their scores would outgrow ``SCRATCH``.
ROWS = 256


class Reconstructed(Score):
    """Stands for scores that come from a pass of the whole model: a layer by itself has none."""

    def observe(self, store: Store, step: Step) -> None:
        """Nothing: the queries of the prompt do not count."""

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> NoReturn:
        raise CacheStateError(
            "kvzip has to choose tokens and no reconstruction pass was run: the caches were not fed by a model that "
            "for_model made ready, or end_prefill() was called. Call prepare_kvzip(model, caches, tokens) instead."
        )


def peaks(q: mx.array, keys: mx.array, start: int, stop: int, scale: float, sinks: mx.array | None = None) -> mx.array:
    """The largest weight ``(B, H, stop - start)`` float32 that any query of a kv head gives keys ``start`` to ``stop``.

    ``keys`` ``(B, H, n, D)`` end with those of the queries ``(B, Hq, R, D)`` themselves, which see them causally and
    all others whole. ``sinks`` ``(Hq,)`` are learned sink logits.
    """
    b, hq, length, d = q.shape
    h, n = keys.shape[1], keys.shape[2]
    columns = keys.astype(mx.float32).swapaxes(-1, -2)
    step = max(1, min(ROWS, SCRATCH // (4 * b * hq * n)))
    best: list[mx.array] = []
    for row in range(0, length, step):
        some = mx.depends([q[:, :, row : row + step]], best)[0]
        rows = some.shape[2]
        z = (some.astype(mx.float32) * scale).reshape(b, h, hq // h * rows, d) @ columns
        z = masks.apply(z.reshape(b, h, hq // h, rows, n), "causal", past=n - length, row=row)
        peak = reference.softmax(z, sinks)[..., start:stop].max(axis=(2, 3))
        best = [mx.maximum(best[0], peak) if best else peak]
    return best[0]


def best(scores: Sequence[np.ndarray], pairs: int) -> list[np.ndarray]:
    """Which pairs stay, boolean ``(H, n)`` per layer: the ``pairs`` best of all ``scores`` ``(H, n)`` together.

    Ties go to lower layers, then heads, then older rows.
    """
    if pairs == 0:
        return [np.zeros(score.shape, np.bool_) for score in scores]
    flat = np.concatenate([score.ravel() for score in scores])
    least = np.partition(flat, flat.size - pairs)[flat.size - pairs]
    chosen = flat > least
    chosen[np.flatnonzero(flat == least)[: pairs - int(chosen.sum())]] = True
    ends = np.cumsum([score.size for score in scores])
    return [part.reshape(s.shape) for part, s in zip(np.split(chosen, ends[:-1]), scores, strict=True)]


def ragged(chosen: np.ndarray) -> tuple[mx.array, mx.array | None]:
    """Rows ``(1, H, m)``, oldest first, that ``chosen`` ``(H, n)`` names, and which are no padding (None: all)."""
    counts = chosen.sum(axis=-1, keepdims=True)
    width = max(int(counts.max()), 1)
    order = np.argsort(~chosen, axis=-1, kind="stable")[:, :width]
    valid = np.arange(width) < counts
    index = mx.array(np.where(valid, order, 0).astype(np.int32))[None]
    return index, None if valid.all() else mx.array(valid)[None]
