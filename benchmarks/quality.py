"""What each method costs in quality: SmolLM2-135M and Gemma 3 270M, teacher-forced on the committed text.

The model reads a prompt and then predicts each following token, once with its own cache in float32 and once with
compressed caches that receive keys and values in float16. Bits are what the compressed layers hold at the end, float
rows, parameters, positions and constants included. mlx_lm's QuantizedKVCache (group 64, everything quantised) is the
baseline. In Gemma only the 3 full-attention layers of 18 are compressed, by every row alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.cache.report import cache_report
from veloxquant_mlx.quality.measure import Reference, compare, reference, store_as, teacher_force

from . import common

METHODS: dict[str, dict[str, Any]] = {
    **{f"kivi {b}-bit": {"method": "kivi", "bit_width_inlier": b, "residual_length": 32} for b in (8, 4, 3, 2)},
    "kivi 2-bit, residual 128": {"method": "kivi", "bit_width_inlier": 2},
    **{f"turboquant_rvq {b}": {"method": "turboquant_rvq", "bit_width_inlier": b} for b in (4, 3, 2, 1)},
    "snapkv 256": {"method": "snapkv", "snap_budget": 256},
    "streaming_llm 256": {"method": "streaming_llm", "stream_window_size": 252},
}


def quantized(model: Any, bits: int) -> list[Any]:
    """mlx_lm's own quantised cache where the model has a full cache."""
    stock: list[Any] = make_prompt_cache(model)
    return [QuantizedKVCache(group_size=64, bits=bits) if type(c) is KVCache else c for c in stock]


def bits_held(caches: list[Any]) -> float:
    """Bits per number over the compressed layers."""
    ours = [layer for layer in cache_report(caches).layers if layer.uncompressed]
    held, numbers = sum(layer.nbytes for layer in ours), sum(layer.uncompressed for layer in ours) // 2
    for cache in caches:
        if isinstance(cache, QuantizedKVCache):
            words: Any = (cache.keys[0], cache.values[0])  # type: ignore[reportOptionalSubscript]
            b, h, *_ = words[0].shape
            dims = sum(w.shape[-1] * 32 // cache.bits for w in words)
            held, numbers = held + int(cache.nbytes), numbers + b * h * cache.offset * dims  # type: ignore[reportOperatorIssue]
    return 8 * held / numbers


def row(
    label: str, model: Any, make: Callable[[], list[Any]], tokens: list[int], prompt: int, truth: Reference
) -> dict[str, Any]:
    caches = make()
    store_as(caches, mx.float16)
    run = teacher_force(model, tokens, caches, prompt, step=512)
    found, index = compare(truth, run), np.arange(len(run.logprobs))
    target = np.array(tokens[prompt:])
    nll = [-logprobs[index, target].mean() for logprobs in (run.logprobs, truth.run.logprobs)]
    return {
        "cache": label,
        "bits held": bits_held(caches),
        "mean KL": found.mean_kl,
        "p99 KL": found.p99_kl,
        "top-1": found.top1_agreement,
        "perplexity ratio": float(np.exp(nll[0] - nll[1])),
    }


def main(name: str, prompt: int, scored: int) -> None:
    model, text = common.load(name)
    tokens = text[: prompt + scored]
    truth, rows = reference(model, tokens, prompt, step=512), []
    for label, fields in METHODS.items():
        config = KVCacheConfig(**fields)
        make = lambda c=config: KVCacheBuilder.for_model(model, c, serve_standalone=True)  # noqa: E731
        rows.append(row(label, model, make, tokens, prompt, truth))
    # Three bits do not divide a word: mlx_lm's buffers only fit heads of 64 there.
    for bits in (8, 4, 3, 2) if name == "smollm2" else (8, 4, 2):
        make = lambda b=bits: quantized(model, b)  # noqa: E731
        rows.append(row(f"mlx_lm QuantizedKVCache {bits}-bit", model, make, tokens, prompt, truth))
    nll = -truth.run.logprobs[np.arange(len(truth.run.logprobs)), np.array(tokens[prompt:])].mean()
    settings = {"model": name, "kv": "float16", "prompt": prompt, "scored": len(truth.run.logprobs)}
    settings["perplexity of the model"] = float(np.exp(nll))
    common.show(f"{name}: {prompt} tokens of prompt, {scored} scored", rows)
    common.save(f"quality_{name}", settings, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("smollm2", "gemma3"), nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--prompt", type=int, default=704)
    parser.add_argument("--scored", type=int, default=64)
    options = parser.parse_args()
    for chosen in options.model:
        main(chosen, options.prompt, options.scored)
