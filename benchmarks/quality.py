"""What each method costs in quality: SmolLM2-135M and Gemma 3 270M, teacher-forced on the committed text.

The model reads a prompt and then predicts each following token, once with its own cache in float32 and once with
compressed caches that receive keys and values in float16. Bits are what the compressed layers hold at the end, float
rows, parameters, positions and constants included. mlx_lm's QuantizedKVCache (everything quantised) is the baseline. In
Gemma only the 3 full-attention layers of 18 are compressed, by every row alike.

"Keys only" and "values only" leave the other side as it came; bits are still those of both, so half of that side's
bits and 8. Prompts beyond the committed texts begin with the licence.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.cache.registry import method
from veloxquant_mlx.cache.report import cache_report
from veloxquant_mlx.core.types import Stream
from veloxquant_mlx.quality.measure import Reference, compare, reference, store_as, teacher_force

from . import common


def _widths(label: str, method: str, widths: tuple[int, ...], **fields: Any) -> dict[str, dict[str, Any]]:
    """Rows of one method at several widths; a field whose value is None takes the width."""
    return {
        f"{label} {bits}-bit": {"method": method, **{k: bits if v is None else v for k, v in fields.items()}}
        for bits in widths
    }


WIDE = (4, 3, 2)
HEAD_DIM = {"smollm2": 64, "gemma3": 256}
ROW = {"smollm2": 2 * 3 * 64, "gemma3": 2 * 256}  # numbers of a token's keys in a group of two layers
# Below, ``jl_dim`` and ``palu_rank`` count heads, and ``xkv_rank`` such rows.
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
    "turboquant_mse 3/8-bit": {"method": "turboquant_mse", "bit_width_inlier": 3, "bit_width_outlier": 8},
    "turboquant_mse 3/4-bit": {"method": "turboquant_mse", "bit_width_inlier": 3, "bit_width_outlier": 4},
    **_widths("turboquant_prod", "turboquant_prod", WIDE, bit_width_inlier=None),
    **_widths("turboquant_rvq", "turboquant_rvq", (4, 3, 2, 1), bit_width_inlier=None),
    **_widths("polar", "polar", WIDE, bit_width_inlier=None),
    **{
        f"qjl, {size} x head_dim signs, {apart} outliers, values of {bits} bits": {
            "method": "qjl",
            "bit_width_inlier": bits,
            "jl_dim": size,
            "n_outlier_channels": apart,
            "residual_length": 32,
        }
        for size, apart, bits in ((1, 0, 2), (2, 8, 2), (2, 8, 4), (4, 8, 4))
    },
    **_widths("spectral", "spectral", WIDE, bit_width_inlier=None),
    "svdq": {"method": "svdq"},
    **_widths("nsnquant", "nsnquant", (2, 1), nsn_bits=None),
    "vecinfer": {"method": "vecinfer"},
    "vecinfer, window 32": {"method": "vecinfer", "residual_length": 32},
    "vecinfer, window 32, keys and values 8 bits per 4": {
        "method": "vecinfer",
        "residual_length": 32,
        "key_codebook_bits": 8,
        "value_sub_dim": 4,
    },
    "vecinfer, window 32, keys and values 8 bits per 2": {
        "method": "vecinfer",
        "residual_length": 32,
        "key_codebook_bits": 8,
        "key_sub_dim": 2,
        "value_sub_dim": 2,
    },
    "amc": {"method": "amc"},
    "amc, all 8-bit": {"method": "amc", "amc_k_high": 0.0, "amc_k_mid": 1.0},
    "amc, all 4-bit": {"method": "amc", "amc_k_high": 0.0, "amc_k_mid": 0.0},
    "age_tiered": {"method": "age_tiered"},
    "age_tiered, 2 bits from age 256": {"method": "age_tiered", "age_mid_boundary": 256},
    "a2ats (reads a fifth, holds all)": {"method": "a2ats"},
    "anchorkv": {"method": "anchorkv"},
    "anchorkv, a quarter of the bytes": {"method": "anchorkv", "anchorkv_theta": 0.25, "anchorkv_residual_bits": 4},
    "anchorkv, an eighth of the bytes": {"method": "anchorkv", "anchorkv_theta": 0.125},
    **{f"kvtc {bits} bits a row": {"method": "kvtc", "kvtc_bit_budget": bits} for bits in (512, 256, 192, 128)},
    "palu": {"method": "palu"},
    **{
        f"palu, {share:.0%} of the width, {bits} bits": {
            "method": "palu",
            "palu_rank": share,
            "palu_hi_bit": bits,
            "palu_lo_bit": bits,
        }
        for share, bits in ((0.5, 16), (1.0, 4), (0.75, 4), (0.5, 4))
    },
    "xquant": {"method": "xquant", "residual_length": 32},
    **{
        f"xquant {bits}-bit, residual of {more} bits": {
            "method": "xquant",
            "xquant_base_bits": bits,
            "xquant_residual_bits": more,
            "residual_length": 32,
        }
        for bits, more in ((2, 0), (4, 0), (2, 2), (4, 2))
    },
    **{
        f"minicache, threshold {least}": {"method": "minicache", "minicache_retention_threshold": least}
        for least in (0.9, 0.0)
    },
    "xkv": {"method": "xkv"},
    **{f"xkv, {share:.0%} of the width": {"method": "xkv", "xkv_rank": share} for share in (0.25, 0.4)},
    "xkv, 25% of the width, latents of 16 bits": {"method": "xkv", "xkv_rank": 0.25, "xkv_latent_bits": 16},
    "snapkv 256": {"method": "snapkv", "snap_budget": 256},
    "streaming_llm 256": {"method": "streaming_llm", "stream_window_size": 252},
}
# Methods that treat keys and values differently, or whose sides cost differently: each side is measured alone as well.
ONE_SIDE = (
    "kivi 2-bit",
    "kitty 2/4-bit",
    "kvquant 2-bit",
    "skvq, no window, 2-bit",
    "skvq, window 32, 2-bit",
    "turboquant_mse 4-bit",
    "turboquant_mse 3-bit",
    "turboquant_prod 3-bit",
    "turboquant_rvq 2-bit",
    "polar 3-bit",
    "qjl, 2 x head_dim signs, 8 outliers, values of 2 bits",
    "spectral 3-bit",
    "nsnquant 2-bit",
    "vecinfer, window 32",
    "kvtc 192 bits a row",
    "palu, 50% of the width, 16 bits",
    "palu",
    "xquant",
    "xkv, 25% of the width",
)
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
        "device": device(),
    }


def device() -> str:
    """The machine of a row, in a word."""
    return "CPU" if mx.default_device() == mx.cpu else str(common.machine()["name"]).split()[-1]


def ours(model: Any, fields: list[dict[str, Any]], plain: str | None = None) -> list[Any]:
    """Our caches; ``plain`` names the side, ``keys`` or ``values``, that is not compressed."""
    configs = [KVCacheConfig(**f) for f in fields]
    if plain is None:
        return KVCacheBuilder.for_model(model, configs if len(configs) > 1 else configs[0], serve_standalone=True)
    module = method(configs[0].method).module
    whole = module.recipe

    def half(config: Any, layer: Any) -> Any:
        return replace(whole(config, layer), **{plain: Stream()})

    with patch.object(module, "recipe", half):
        return KVCacheBuilder.for_model(model, configs[0], serve_standalone=True)


def all_rows(model: Any, name: str) -> dict[str, Callable[[], list[Any]]]:
    """What makes the caches of every row, by its label."""
    makes: dict[str, Callable[[], list[Any]]] = {}
    sizes = dict.fromkeys(("jl_dim", "palu_rank"), HEAD_DIM[name]) | {"xkv_rank": ROW[name]}
    methods = {
        label: {field: int(value * sizes[field]) if field in sizes else value for field, value in fields.items()}
        for label, fields in METHODS.items()
    }
    for label, fields in methods.items():
        makes[label] = lambda f=fields: ours(model, [f])
    for label in ONE_SIDE:
        for side, other in (("keys", "values"), ("values", "keys")):
            makes[f"{label}, {side} only"] = lambda f=methods[label], o=other: ours(model, [f], o)
    for label, pair in PAIRS.items():
        makes[label] = lambda p=pair: ours(model, list(p))
    # Three bits do not divide a word: mlx_lm's buffers only fit heads of 64 there.
    for bits in (8, 4, 3, 2) if name == "smollm2" else (8, 4, 2):
        for group in (32, 64):
            label = f"mlx_lm QuantizedKVCache {bits}-bit, groups of {group}"
            makes[label] = lambda b=bits, g=group: quantized(model, b, g)
    return makes


def save(name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write ``rows`` and those of earlier runs that they do not replace, fewest bits first."""
    path, labels = common.RESULTS / f"{name}.json", {row["cache"] for row in rows}
    before = json.loads(path.read_text()) if path.exists() else {"machines": {}, "rows": []}
    kept = [row for row in before["rows"] if row["cache"] not in labels]
    found = {
        "machines": {**before["machines"], device(): common.machine()},
        "settings": settings,
        "rows": sorted([*rows, *kept], key=lambda row: row["bits held"]),
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main(name: str, prompt: int, scored: int, wanted: list[str] | None) -> None:
    model, text = common.load(name)
    if prompt + scored > len(text):
        licence = (common.ROOT / "LICENSE").read_text(encoding="utf-8")
        text = list(common.tokenizer(name).encode(licence)) + text
    tokens = text[: prompt + scored]
    truth, rows = reference(model, tokens, prompt, step=512), []
    file = f"quality_{name}" if prompt == 1024 else f"quality_{name}_{prompt}"
    nll = -truth.run.logprobs[np.arange(len(truth.run.logprobs)), np.array(tokens[prompt:])].mean()
    settings = {"model": name, "kv": "float16", "prompt": prompt, "scored": len(truth.run.logprobs)}
    settings["perplexity of the model"] = float(np.exp(nll))
    for label, make in all_rows(model, name).items():
        if wanted is None or any(label.startswith(start) for start in wanted):
            rows.append(row(label, model, make, tokens, prompt, truth))
            print(rows[-1], flush=True)
            save(file, settings, rows)  # a run that is broken off has not been for nothing
    common.show(f"{name}: {prompt} tokens of prompt, {scored} scored", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("smollm2", "gemma3"), nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=64)
    parser.add_argument("--rows", nargs="+", default=None, help="only rows whose label starts so; others are kept")
    options = parser.parse_args()
    for chosen in options.model:
        main(chosen, options.prompt, options.scored, options.rows)
