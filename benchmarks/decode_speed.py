"""Decode speed of SmolLM2-135M after a long prompt, as a ratio to mlx_lm's uncompressed cache in the same run.

Every round decodes a short burst uncompressed, then one with each method, on the same tokens; a method's ratio is the
median over the rounds of (uncompressed seconds) / (seconds). Other work on the machine slows both alike.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig

from . import common

METHODS: dict[str, dict[str, Any]] = {
    **common.caches("kivi 2-bit", "kivi 4-bit", "turboquant_rvq 1", "turboquant_rvq 2"),
    "snapkv 256": {"method": "snapkv", "snap_budget": 256},
    "streaming_llm 256": {"method": "streaming_llm", "stream_window_size": 252},
}


def prefill(model: Any, caches: list[Any], ids: mx.array, step: int = 512) -> None:
    """The prompt as mlx_lm feeds it: chunks, then its last token alone."""
    last = ids.shape[1] - 1
    for start in range(0, last, step):
        model(ids[:, start : min(start + step, last)], cache=caches)
        mx.eval([c.state for c in caches])
    mx.eval(model(ids[:, last:], cache=caches), [c.state for c in caches])


def burst(model: Any, caches: list[Any], ids: mx.array) -> float:
    """Seconds per token of decoding ``ids`` one by one."""
    began = time.perf_counter()
    for i in range(ids.shape[1]):
        mx.eval(model(ids[:, i : i + 1], cache=caches))
    return (time.perf_counter() - began) / ids.shape[1]


def main(prompt: int, decode: int, size: int, methods: list[str]) -> None:
    model, tokens = common.load("smollm2")
    tokens = tokens * -(-(prompt + decode) // len(tokens))  # speed does not mind a text that repeats
    ids = mx.array(tokens[: prompt + decode])[None]
    stock: list[Any] = make_prompt_cache(model)
    prefill(model, stock, ids[:, :prompt])
    rivals = {}
    for label in methods:
        rivals[label] = KVCacheBuilder.for_model(model, KVCacheConfig(**METHODS[label]), serve_standalone=True)
        prefill(model, rivals[label], ids[:, :prompt])
    for caches in (stock, *rivals.values()):  # first calls build tables: not what is measured
        burst(model, copy.deepcopy(caches), ids[:, prompt : prompt + 2])
    base: list[float] = []
    spent: dict[str, list[float]] = {label: [] for label in rivals}
    for start in range(prompt, prompt + decode, size):
        part = ids[:, start : start + size]
        base.append(burst(model, stock, part))
        for label, caches in rivals.items():
            spent[label].append(burst(model, caches, part))
    rows = [{"cache": "mlx_lm, uncompressed", "ms_per_token": statistics.median(base) * 1e3, "ratio": 1.0}]
    for label, seconds in spent.items():
        ratio = statistics.median(b / s for b, s in zip(base, seconds, strict=True))
        rows.append({"cache": label, "ms_per_token": statistics.median(seconds) * 1e3, "ratio": ratio})
    settings = {"model": "SmolLM2-135M-Instruct", "dtype": "float32", "prompt": prompt, "decode": decode, "burst": size}
    common.show(f"decode after {prompt} tokens, {decode} tokens in bursts of {size}; ratio to uncompressed", rows)
    common.save("decode_speed" if prompt == 1024 else f"decode_speed_{prompt}", settings, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--burst", type=int, default=8, help="a multiple of the rows packed at a time: 8")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = parser.parse_args()
    main(options.prompt, options.decode, options.burst, options.methods)
