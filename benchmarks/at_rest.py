"""What entropy coding saves in a cache file, and whether differences to an anchor pay: cachegen on SmolLM2-135M.

Each row reads the prompt, then predicts the scored tokens of the committed text from compressed caches that receive
float16. Bits per number are what is held in memory, what ``save_cache`` writes (scales, tables and float rows included)
and the empirical entropy of the coded arrays, which is a bound and not a size. Differences and plain tokens compare by
bits at rest at equal KL.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import mlx.core as mx

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, cache_report
from veloxquant_mlx.quality.measure import compare, reference, store_as, teacher_force

from . import common

GROUPS = {"tokens alone": {"cachegen_use_delta": False}, "anchor every 10": {"cachegen_group_size": 10}}
GROUPS["anchor every 32"] = {"cachegen_group_size": 32}


def settings() -> dict[str, dict[str, Any]]:
    """Every width with and without anchors, one width for all layers; then the method as it comes."""
    rows: dict[str, dict[str, Any]] = {
        f"{bits} bits, {how}": {"cachegen_bits": bits, "cachegen_layer_groups": 1, **fields}
        for bits in (6, 5, 4, 3)
        for how, fields in GROUPS.items()
    }
    rows["4 bits, tokens alone, pooled tables"] = rows["4 bits, tokens alone"] | {"cachegen_per_channel": False}
    return rows | {"default": {}}


def main(prompt: int, scored: int) -> None:
    model, text = common.load("smollm2")
    tokens, rows = text[: prompt + scored], []
    truth = reference(model, tokens, prompt, step=512)
    for label, fields in settings().items():
        caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="cachegen", **fields))
        store_as(caches, mx.float16)
        found = compare(truth, teacher_force(model, tokens, caches, prompt, step=512))
        start = time.perf_counter()
        report = cache_report(caches, at_rest=True)
        seconds = time.perf_counter() - start
        assert report.at_rest is not None
        numbers = report.uncompressed / 2
        rows.append(
            {
                "cachegen": label,
                "held": 8 * report.nbytes / numbers,
                "at rest": 8 * report.at_rest.nbytes / numbers,
                "coded": 8 * report.at_rest.coded / numbers,
                "entropy": 8 * report.at_rest.entropy / numbers,
                "mean KL": found.mean_kl,
                "seconds": seconds,
            }
        )
    common.show(f"smollm2: {prompt} tokens of prompt, {scored} scored; bits per number", rows)
    common.save("at_rest", {"model": "smollm2", "kv": "float16", "prompt": prompt, "scored": scored}, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--scored", type=int, default=32)
    options = parser.parse_args()
    main(options.prompt, options.scored)
