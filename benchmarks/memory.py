"""Bytes that 16-bit keys and values of SmolLM2-135M really take: 1,024 tokens of prompt and 64 decoded.

The float32 model runs once over a cache that records keys, values and queries. Keys and values are rounded to float16
and fed layer by layer into fresh caches as mlx_lm feeds them: the prompt but for its last token, that token, 64 single
tokens. Bytes are ``nbytes`` of the caches; the growth of MLX's active memory must follow. Peaks cover the attention of
one layer at a time, which multiplies in float32 on a CPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.attention import hook
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.report import cache_report

from . import common


class Recorder(KVCache):
    """mlx_lm's own cache, which also keeps the queries that attend to it."""

    shared = False

    def __init__(self) -> None:
        super().__init__()
        self._issued: Any = None
        self.queries: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self._issued = super().update_and_fetch(keys, values)
        return self._issued

    def attend(self, queries: mx.array, *, scale: float, mask: Any, sinks: Any) -> mx.array:
        self.queries.append(queries * 1)
        mx.eval(self.queries)
        return mx.fast.scaled_dot_product_attention(queries, *self._issued, scale=scale, mask=mask, sinks=sinks)


@dataclass(frozen=True)
class Layer:
    """Keys and values ``(1, H, T, D)`` in float16, queries ``(1, Hq, T, D)`` in float32."""

    k: mx.array
    v: mx.array
    q: mx.array


def record(model: Any, ids: mx.array) -> list[Layer]:
    """What every layer of the model computes for ``ids``."""
    hook.install(model)
    caches = [Recorder() for _ in model.layers]
    for start in range(0, ids.shape[1], 512):
        mx.eval(model(ids[:, start : start + 512], cache=caches))
    layers = []
    for cache in caches:
        k, v = (x.astype(mx.float16) for x in (cache._issued[0], cache._issued[1]))
        layers.append(Layer(k, v, mx.concatenate(cache.queries, axis=2)))
        mx.eval(k, v, layers[-1].q)
    return layers


def feed(cache: Any, layer: Layer, start: int, stop: int) -> mx.array:
    """Attention output of tokens ``start`` to ``stop``; nothing is evaluated here."""
    k, v, q = (x[:, :, start:stop] for x in (layer.k, layer.v, layer.q))
    mask, scale = "causal" if stop - start > 1 else None, q.shape[-1] ** -0.5
    keys, values = cache.update_and_fetch(k, v)
    if isinstance(cache, CompressedKVCache):
        return cache.attend(q, scale=scale, mask=mask)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)


def settle() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


Formula = Callable[[int, int], float]
"""Bits held per number of the uncompressed rows, from the number of tokens and how many of them were decoded."""


def kivi(bits: int, group: int = 32, residual: int = 128) -> Formula:
    """Whole residuals of keys and all but a residual of values are packed, with two float16 a group."""

    def bits_held(n: int, decoded: int) -> float:
        packed = n // residual * residual + max(0, n - residual)
        return (packed * (bits + 32 / group) + (2 * n - packed) * 16) / (2 * n)

    return bits_held


METHODS: dict[str, tuple[dict[str, Any], Formula]] = {
    "kivi 2-bit": ({"method": "kivi", "bit_width_inlier": 2}, kivi(2)),
    "kivi 4-bit": ({"method": "kivi", "bit_width_inlier": 4}, kivi(4)),
    "turboquant_rvq 1": ({"method": "turboquant_rvq", "bit_width_inlier": 1}, lambda n, _: 2 + 16 / 64),
    "turboquant_rvq 2": ({"method": "turboquant_rvq", "bit_width_inlier": 2}, lambda n, _: 4 + 16 / 64),
    "snapkv 256": ({"method": "snapkv", "snap_budget": 256}, lambda n, decoded: 16 * (256 + decoded) / n),
    "streaming_llm 256": ({"method": "streaming_llm", "stream_window_size": 252}, lambda n, _: 16 * 256 / n),
}


def measure(label: str, make: Callable[[], list[Any]], layers: list[Layer], prompt: int) -> dict[str, Any]:
    """One row: bytes held after the prompt and at the end, against 16-bit rows of the same tokens."""
    total = layers[0].k.shape[2]
    base = settle()
    caches = make()
    mx.reset_peak_memory()
    for cache, layer in zip(caches, layers, strict=True):
        mx.eval(feed(cache, layer, 0, prompt - 1), cache.state)
        mx.eval(feed(cache, layer, prompt - 1, prompt), cache.state)
    peak = mx.get_peak_memory() - base
    after_prompt = cache_report(caches).nbytes
    for t in range(prompt, total):
        mx.eval([feed(cache, layer, t, t + 1) for cache, layer in zip(caches, layers, strict=True)])
    mx.eval([c.state for c in caches])
    grown = settle() - base
    receipt = cache_report(caches)
    held = receipt.nbytes
    index, fixed = (sum(getattr(layer, kind) for layer in receipt.layers) for kind in ("index", "fixed"))
    rows = held - index - fixed
    per_token = sum(2 * layer.k.nbytes for layer in layers) / total
    return {
        "cache": label,
        "MiB after prompt": after_prompt / common.MIB,
        "x after prompt": prompt * per_token / after_prompt,
        "MiB at end": held / common.MIB,
        "x at end": total * per_token / held,
        "x rows only": total * per_token / rows,
        "index MiB": index / common.MIB,
        "constants MiB": fixed / common.MIB,
        "active growth MiB": grown / common.MIB,
        "prefill peak MiB": peak / common.MIB,
    }


def main(prompt: int, decode: int) -> None:
    model, tokens = common.load("smollm2")
    total = prompt + decode
    layers = record(model, mx.array(tokens[:total])[None])
    rows = [measure("mlx_lm, 16-bit", lambda: [KVCache() for _ in layers], layers, prompt) | {"x by formula": 1.0}]
    for label, (fields, bits) in METHODS.items():
        config = KVCacheConfig(**fields)
        row = measure(label, lambda c=config: KVCacheBuilder.for_model(model, c, serve_standalone=True), layers, prompt)
        rows.append(row | {"x by formula": 16 / bits(total, decode)})
    settings = {"model": "SmolLM2-135M-Instruct", "kv": "float16", "prompt": prompt, "decoded": decode}
    common.show(f"{total} tokens ({decode} of them decoded), 30 layers, 3 kv heads of 64, float16 K/V", rows)
    common.save("memory", settings, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--decode", type=int, default=64)
    options = parser.parse_args()
    main(options.prompt, options.decode)
