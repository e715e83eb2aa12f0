"""20,000 decode steps with bounded caches on a small random model: rows, bytes, active memory, positions."""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, cache_report

from . import common

SHAPE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
}  # fmt: skip
BUDGET = 128
CONFIGS: dict[str, Any] = {
    "h2o": KVCacheConfig(method="h2o", h2o_budget=BUDGET),
    "streaming_llm": KVCacheConfig(method="streaming_llm", stream_window_size=BUDGET - 4),
    "h2o+kivi": [KVCacheConfig(method="h2o", h2o_budget=BUDGET), KVCacheConfig(method="kivi", residual_length=32)],
}


def main(steps: int) -> None:
    rows = []
    for name, config in CONFIGS.items():
        mx.random.seed(0)
        model = llama.Model(llama.ModelArgs.from_dict(SHAPE))
        caches = KVCacheBuilder.for_model(model, config)
        ids = mx.random.randint(0, 64, (1, 512), key=mx.random.key(0))
        model(ids, cache=caches)
        held, active, most, began = [], [], 0, time.perf_counter()
        for step in range(steps):
            mx.eval(model(ids[:, step % 512 : step % 512 + 1], cache=caches))
            if step % 500 == 499:
                gc.collect()
                held.append(sum(cache.nbytes for cache in caches))
                active.append(mx.get_active_memory())
                most = max(most, *(layer.rows for layer in cache_report(caches).layers))
        positions = [np.array(cache.positions) for cache in caches]
        true = all((p.max(-1) == 512 + steps - 1).all() and (np.diff(p) > 0).all() for p in positions)
        rows.append(
            {
                "cache": name,
                "steps": steps,
                "most rows": most,
                "budget": BUDGET,
                "bytes, first half": max(held[: len(held) // 2]),
                "bytes, second half": max(held[len(held) // 2 :]),
                "growth of active memory": max(active[len(active) // 2 :]) - max(active[: len(active) // 2]),
                "positions true": true,
                "ms per step": 1e3 * (time.perf_counter() - began) / steps,
            }
        )
        print(rows[-1], flush=True)
    common.show(f"{steps} decode steps after a prompt of 512", rows)
    common.save("long_run", {"steps": steps, "model": SHAPE}, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    main(parser.parse_args().steps)
