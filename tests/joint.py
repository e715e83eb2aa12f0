"""Groups of caches that are packed together, fed without a model; the settings that run in the tests of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from tests.matrix import Shape, Tensors, feed, tensors
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.attention import forward
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.types import LayerInfo

SIZES = (1, 2, 3, 5)
# One or two settings per cross-layer method. ``waits``: nothing is packed before the prompt has ended.
METHODS: dict[str, dict[str, Any]] = {
    "xquant": {"residual_length": 32},
    "xquant paper": {"residual_length": 32, "xquant_residual_bits": 0, "xquant_base_bits": 3},
    # two and three layers retain some pairs, the keys of five so many that they stay as they came
    "minicache": {"minicache_start_frac": 0.0, "minicache_retention_threshold": 0.95, "minicache_max_ctx": 64},
    "xkv": {"xkv_rank": 16},
}
WAITS: tuple[str, ...] = ("xkv",)


def layers(count: int, seed: int = 0, tokens: int = 300, shape: Shape = (1, 2, 64, 64)) -> list[Tensors]:
    """Rows of ``count`` layers that are somewhat alike, as neighbours are."""
    first = tensors(tokens, shape, seed=seed)
    out = [first]
    for j in range(1, count):
        own = tensors(tokens, shape, seed=seed + 100 * j)
        out.append(Tensors(own.q, first.k + 0.2 * own.k, first.v + 0.2 * own.v))
    return out


def group(
    name: str, members: int, shape: Shape = (1, 2, 64, 64), number: int = 0, **fields: Any
) -> list[CompressedKVCache]:
    """Empty caches of one group."""
    config = KVCacheConfig(**{"method": name.partition(" ")[0], **METHODS[name], **fields})
    first = LayerInfo(shape[2], shape[3], shape[1], n_layers=members, group=number, members=members)
    return [CompressedKVCache(config, replace(first, index=j, rank=j, member=j)) for j in range(members)]


def run(caches: Sequence[CompressedKVCache], data: Sequence[Tensors], chunks: Sequence[int]) -> list[mx.array]:
    """Feed every layer its rows, as a forward pass does: layer after layer, chunk after chunk. Outputs per layer."""
    outs: list[list[mx.array]] = [[] for _ in caches]
    at = 0
    for n in chunks:
        meet(caches, n)
        for out, cache, rows in zip(outs, caches, data, strict=True):
            out.append(feed(cache, rows.part(at, at + n), [n]))
        at += n
    return [mx.concatenate(out, axis=2) for out in outs]


def meet(caches: Sequence[Any], tokens: int) -> None:
    """What happens before a model's layers run on ``tokens`` tokens."""
    forward.coordinate(None, mx.zeros((1, tokens), mx.int32), list(forward.shares(list(caches), tokens)))
