"""Peak memory of attending one chunk of a prompt over packed history, with and without a decoded copy of it.

Shapes of an 8B model: 32 query heads, 8 kv heads of 128. The history is packed; then 128 query rows attend over it,
once block by block (what the library does) and once over a decoded copy with MLX's attention (what it avoids). The
peak is counted above what is held before the call.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.attention import blockwise
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.store import Store
from veloxquant_mlx.core.types import LayerInfo

from . import common

HEADS, KV_HEADS, DIM = 32, 8, 128
METHODS = common.caches("kivi 2-bit", "turboquant_rvq 2")


def packed(fields: dict[str, Any], tokens: int, dtype: mx.Dtype, chunk: int = 1024) -> Store:
    """The store of a cache that was fed ``tokens`` random rows."""
    info = LayerInfo(head_dim=DIM, value_dim=DIM, kv_heads=KV_HEADS)
    cache = CompressedKVCache(KVCacheConfig(**fields), info)
    for at in range(0, tokens, chunk):
        rows = mx.random.normal((2, 1, KV_HEADS, min(chunk, tokens - at), DIM), key=mx.random.key(at)).astype(dtype)
        cache.append(rows[0], rows[1])
        cache.settle()
        mx.eval(cache.state)
    return cache.store


def peak(call: Callable[[], mx.array]) -> int:
    """Bytes above what is held before the call."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call())
    return mx.get_peak_memory() - before


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--history", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rows", type=int, default=128)
    options = parser.parse_args(words)
    histories, rows, dtype = options.history, options.rows, mx.float32
    scale, out = DIM**-0.5, []
    q = mx.random.normal((1, HEADS, rows, DIM), key=mx.random.key(1)).astype(dtype)
    mx.eval(q)
    for label, fields in METHODS.items():
        for n in histories:
            store = packed(fields, n, dtype)

            def copied(store: Store = store) -> mx.array:
                keys, values = store.keys.dense(), store.values.dense()
                return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask="causal")

            def blocks(store: Store = store) -> mx.array:
                return blockwise.attention(store, q, scale, "causal", None)

            ours, copy = peak(blocks), peak(copied)
            out.append(
                {
                    "cache": label,
                    "history": n,
                    "held MiB": sum(a.nbytes for a in store.arrays().values()) / common.MIB,
                    "16-bit K/V MiB": n * 2 * KV_HEADS * DIM * 2 / common.MIB,
                    "peak of blocks MiB": ours / common.MIB,
                    "peak of decoded copy MiB": copy / common.MIB,
                    "ratio": copy / ours,
                }
            )
    settings = {"query rows": rows, "query heads": HEADS, "kv heads": KV_HEADS, "head size": DIM, "dtype": str(dtype)}
    common.show(f"attention of {rows} query rows over packed history, {dtype}: bytes above what is held", out)
    common.save("prefill_memory", settings, out)


if __name__ == "__main__":
    main()
