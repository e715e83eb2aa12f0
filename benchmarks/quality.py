"""What each method costs in quality: SmolLM2-135M and Gemma 3 270M, teacher-forced on the committed text.

The model reads a prompt and then predicts each following token, once with its own cache in float32 and once with
compressed caches that receive keys and values in float16. Bits are what the compressed layers hold at the end, float
rows, parameters, positions and constants included. mlx_lm's QuantizedKVCache (everything quantised) is the baseline. In
Gemma only the 3 full-attention layers of 18 are compressed, by every row alike.
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


def _widths(label: str, method: str, widths: tuple[int, ...], **fields: Any) -> dict[str, dict[str, Any]]:
    """Rows of one method at several widths; a field whose value is None takes the width."""
    return {
        f"{label} {bits}-bit": {"method": method, **{k: bits if v is None else v for k, v in fields.items()}}
        for bits in widths
    }


WIDE = (4, 3, 2)
METHODS: dict[str, dict[str, Any]] = {
    **_widths("kivi", "kivi", (8, *WIDE), bit_width_inlier=None, residual_length=32),
    **_widths(
        "kivi, groups of 64, no window,", "kivi", WIDE, bit_width_inlier=None, kivi_group_size=64, residual_length=0
    ),
    "kivi 2-bit, residual 128": {"method": "kivi", "bit_width_inlier": 2},
    "kivi_sink 2-bit, residual 128": {"method": "kivi_sink", "bit_width_inlier": 2},
    "kitty 2/4-bit": {"method": "kitty", "residual_length": 64, "kitty_group_size": 64},
    "kitty 3/5-bit": {
        "method": "kitty",
        "residual_length": 64,
        "kitty_group_size": 64,
        "kitty_lo_bit": 3,
        "kitty_hi_bit": 5,
    },
    "kitty 4/6-bit": {
        "method": "kitty",
        "residual_length": 64,
        "kitty_group_size": 64,
        "kitty_lo_bit": 4,
        "kitty_hi_bit": 6,
    },
    **_widths("kvquant", "kvquant", WIDE, kvquant_bits=None),
    **_widths("skvq, window 32,", "skvq", WIDE, skvq_bits_key=None, skvq_bits_value=None, skvq_window=32),
    **_widths("skvq, no window,", "skvq", WIDE, skvq_bits_key=None, skvq_bits_value=None, skvq_window=0),
    "adakv 2.5-bit": {"method": "adakv", "residual_length": 32},
    "adakv 3.5-bit": {"method": "adakv", "residual_length": 32, "adakv_target_avg_bits": 3.5},
    **_widths("cachegen, all layers,", "cachegen", (5, *WIDE), cachegen_resolved_bits=None),
    "cachegen": {"method": "cachegen"},
    **_widths("gear", "gear", WIDE, gear_bits=None),
    "zipcache 2/4-bit": {"method": "zipcache"},
    "zipcache 3/5-bit": {"method": "zipcache", "zipcache_lo_bits": 3, "zipcache_hi_bits": 5},
    **_widths("turboquant_mse", "turboquant_mse", WIDE, bit_width_inlier=None),
    "turboquant_mse 2/3-bit": {"method": "turboquant_mse", "bit_width_outlier": 3},
    "turboquant_mse 3/4-bit": {"method": "turboquant_mse", "bit_width_inlier": 3, "bit_width_outlier": 4},
    **_widths("turboquant_prod", "turboquant_prod", WIDE, bit_width_inlier=None),
    **_widths("turboquant_rvq", "turboquant_rvq", (4, 3, 2, 1), bit_width_inlier=None),
    **_widths("spectral", "spectral", WIDE, bit_width_inlier=None),
    "svdq": {"method": "svdq"},
    **{f"kvtc {bits} bits a row": {"method": "kvtc", "kvtc_bit_budget": bits} for bits in (512, 256, 192, 128)},
    "snapkv 256": {"method": "snapkv", "snap_budget": 256},
    "streaming_llm 256": {"method": "streaming_llm", "stream_window_size": 252},
}
# Two configurations each: what stays of half the prompt, packed.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{dropping} 512 + {label}": ({"method": dropping, f"{prefix}_budget": 512}, METHODS[label])
    for dropping, prefix in {"snapkv": "snap", "h2o": "h2o", "pyramidkv": "pyramid", "knorm": "knorm"}.items()
    for label in ("kivi 4-bit", "turboquant_rvq 2-bit", "kitty 2/4-bit")
}


def quantized(model: Any, bits: int, group: int) -> list[Any]:
    """mlx_lm's own quantised cache where the model has a full cache."""
    stock: list[Any] = make_prompt_cache(model)
    return [QuantizedKVCache(group_size=group, bits=bits) if type(c) is KVCache else c for c in stock]


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


def main(name: str, prompt: int, scored: int, wanted: list[str] | None) -> None:
    model, text = common.load(name)
    tokens = text[: prompt + scored]
    truth, rows = reference(model, tokens, prompt, step=512), []
    makes: dict[str, Callable[[], list[Any]]] = {}
    for label, fields in METHODS.items():
        config = KVCacheConfig(**fields)
        makes[label] = lambda c=config: KVCacheBuilder.for_model(model, c)
    for label, (first, second) in PAIRS.items():
        pair = [KVCacheConfig(**first), KVCacheConfig(**second)]
        makes[label] = lambda c=pair: KVCacheBuilder.for_model(model, c)
    # Three bits do not divide a word: mlx_lm's buffers only fit heads of 64 there.
    for bits in (8, 4, 3, 2) if name == "smollm2" else (8, 4, 2):
        for group in (32, 64):
            makes[f"mlx_lm QuantizedKVCache {bits}-bit, groups of {group}"] = lambda b=bits, g=group: quantized(
                model, b, g
            )
    for label, make in makes.items():
        if wanted is None or any(label.startswith(start) for start in wanted):
            rows.append(row(label, model, make, tokens, prompt, truth))
            print(rows[-1], flush=True)
    nll = -truth.run.logprobs[np.arange(len(truth.run.logprobs)), np.array(tokens[prompt:])].mean()
    settings = {"model": name, "kv": "float16", "prompt": prompt, "scored": len(truth.run.logprobs)}
    settings["perplexity of the model"] = float(np.exp(nll))
    common.show(f"{name}: {prompt} tokens of prompt, {scored} scored", rows)
    if wanted is None:
        common.save(f"quality_{name}", settings, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("smollm2", "gemma3"), nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=64)
    parser.add_argument("--rows", nargs="+", default=None, help="only rows whose label starts so; nothing is saved")
    options = parser.parse_args()
    for chosen in options.model:
        main(chosen, options.prompt, options.scored, options.rows)
