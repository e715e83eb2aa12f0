"""The golden fixture of the eviction methods: four query heads, two kv heads, 48 tokens of size 8, no rotation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tests.matrix import Tensors, feed
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.types import LayerInfo

QUERY_HEADS, HEADS, TOKENS, DIM = 4, 2, 48, 8
GROUP = QUERY_HEADS // HEADS
SCALE = DIM**-0.5


def _generate() -> list[np.ndarray]:
    """Queries, keys and values, row-major and in this order, from one linear congruential generator."""
    state, out = 12345, []
    for heads in (QUERY_HEADS, HEADS, HEADS):
        x = np.empty(heads * TOKENS * DIM)
        for i in range(x.size):
            state = (1664525 * state + 1013904223) % 2**32
            x[i] = (state / 2**32 - 0.5) * 4
        out.append(x.reshape(heads, TOKENS, DIM))
    return out


def _logits() -> np.ndarray:
    z = SCALE * Q @ np.repeat(K, GROUP, axis=0).swapaxes(1, 2)
    return np.where(np.tril(np.ones((TOKENS, TOKENS), bool)), z, -np.inf)


def softmax(z: np.ndarray) -> np.ndarray:
    """Along the last axis; entries of minus infinity get weight 0."""
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# float64: Q (4, 48, 8), K and V (2, 48, 8), scaled causal logits Z and their weights A (4, 48, 48).
Q, K, V = _generate()
Z = _logits()
A = softmax(Z)

# The same in float32 with a batch axis, as caches take it.
DATA = Tensors(*(mx.array(x[None].astype(np.float32)) for x in (Q, K, V)))


def group_mean(x: np.ndarray) -> np.ndarray:
    """``(4, ...)`` per query head to ``(2, ...)`` per kv head."""
    return x.reshape(HEADS, GROUP, *x.shape[1:]).mean(axis=1)


def new_cache(method: str, layer: LayerInfo | None = None, **fields: Any) -> CompressedKVCache:
    """An empty cache for the fixture's shapes."""
    geometry = LayerInfo(head_dim=DIM, value_dim=DIM, kv_heads=HEADS, query_heads=QUERY_HEADS)
    return CompressedKVCache(KVCacheConfig(method=method, head_dim=DIM, **fields), layer or geometry)  # type: ignore[arg-type]


def fill(cache: CompressedKVCache, chunks: Sequence[int] = (TOKENS,), start: int = 0, ends: bool = True) -> mx.array:
    """Feed tokens from ``start`` on in ``chunks`` to a real cache; ``ends``: then the prompt is complete."""
    out = feed(cache, DATA.part(start, start + sum(chunks)), chunks, scale=SCALE)
    if ends:
        cache.end_prefill()
    return out


def kept(cache: CompressedKVCache) -> list[list[int]]:
    """Positions that are held, ascending, one list per kv head, or one list where all heads share their rows."""
    return [sorted(p for p in head if p >= 0) for head in np.array(cache.positions[0]).tolist()]


def top(score: np.ndarray, budget: int, protected: Iterable[int] = ()) -> list[list[int]]:
    """The specification's selection in numpy: best ``budget`` of ``score`` ``(H, n)``, ties go to lower positions."""
    score = np.array(score, np.float64)
    score[:, list(protected)] = np.inf
    return [sorted(np.argsort(-row, kind="stable")[:budget].tolist()) for row in score]
