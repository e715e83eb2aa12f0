"""One decode step of attention over a long history, as a ratio to MLX's fused attention on 16-bit rows in the same run.

Also mlx_lm's own quantised attention at 4 bits. The history is random; on a CPU float32 stands in for 16 bits, which
MLX computes slowly there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.types import LayerInfo

from . import common

METHODS: dict[str, dict[str, Any]] = {
    "kivi 2-bit": {"method": "kivi", "bit_width_inlier": 2},
    "kivi 4-bit": {"method": "kivi", "bit_width_inlier": 4},
    "turboquant_rvq 1": {"method": "turboquant_rvq", "bit_width_inlier": 1},
    "turboquant_rvq 2": {"method": "turboquant_rvq", "bit_width_inlier": 2},
}
KV_HEADS, QUERY_HEADS, DIM = 8, 32, 128
CHUNK = 8192


def history(tokens: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Keys and values ``(1, H, T, D)`` and one step's queries ``(1, Hq, 1, D)``."""
    shapes = [(1, KV_HEADS, tokens, DIM)] * 2 + [(1, QUERY_HEADS, 1, DIM)]
    k, v, q = (mx.random.normal(s, dtype=mx.float32, key=mx.random.key(i)).astype(dtype) for i, s in enumerate(shapes))
    mx.eval(k, v, q)
    return k, v, q


def filled(fields: dict[str, Any], k: mx.array, v: mx.array, q: mx.array) -> CompressedKVCache:
    """A cache that was fed the history in chunks."""
    cache = CompressedKVCache(KVCacheConfig(**fields), LayerInfo(head_dim=DIM, value_dim=DIM))
    for start in range(0, k.shape[2], CHUNK):
        cache.update_and_fetch(k[:, :, start : start + CHUNK], v[:, :, start : start + CHUNK])
        mx.eval(cache.attend(q, scale=DIM**-0.5), cache.state)
    return cache


def quantised(q: mx.array, keys: Any, values: Any) -> mx.array:
    """mlx_lm's attention over ``mx.quantize`` triples; it scales the queries in place."""
    return quantized_scaled_dot_product_attention(q * 1, keys, values, DIM**-0.5, None, group_size=64, bits=4)


def microseconds(call: Callable[[], mx.array], rounds: int) -> float:
    """Median time of one call, evaluated."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main(lengths: list[int], rounds: int) -> None:
    gpu = mx.default_device() == mx.gpu
    dtype, scale, rows = mx.float16 if gpu else mx.float32, DIM**-0.5, []
    for tokens in lengths:
        k, v, q = history(tokens, dtype)
        fused = partial(mx.fast.scaled_dot_product_attention, q, k, v, scale=scale)
        stock = partial(quantised, q, *(mx.quantize(x, group_size=64, bits=4) for x in (k, v)))
        calls: dict[str, Callable[[], mx.array]] = {"mlx fused attention": fused, "mlx_lm 4-bit": stock}
        held = {"mlx fused attention": 2.0, "mlx_lm 4-bit": 4.5 / 8}
        for label, fields in METHODS.items():
            cache = filled(fields, k, v, q)
            calls[label] = partial(cache.attend, q, scale=scale)
            held[label] = cache.nbytes / (2 * k.size)
        for call in calls.values():
            microseconds(call, 3)
        base = microseconds(fused, rounds)
        for label, call in calls.items():
            took = base if call is fused else microseconds(call, rounds)
            rows.append(
                {
                    "tokens": tokens,
                    "cache": label,
                    "microseconds": round(took, 1),
                    "ratio": round(base / took, 3),
                    "bits_per_number": round(8 * held[label], 3),
                }
            )
            print(f"{tokens} tokens, {label}: {took:.0f} us, {base / took:.2f}x", flush=True)
    common.save("decode_attention_" + ("cuda" if gpu else "cpu"), {"dtype": str(dtype), "rounds": rounds}, rows)
    common.show("decode attention, 32 query heads, 8 kv heads, head size 128", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    main(args.lengths, args.rounds)
