"""A model split over processes gives the tokens of the whole model, each process holding its share of the cache.

    mlx.launch -n 2 benchmarks/distributed/split_model.py --split tensor
    mlx.launch -n 2 benchmarks/distributed/split_model.py --split pipeline

Every process builds the same seeded random model, runs it whole, splits it with mlx_lm's own ``shard`` (heads over
processes) or ``pipeline`` (layers over processes), and runs it again with fresh caches. Each prints one JSON line per
method; the exit code is 1 where tokens differ. Greedy, float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models import qwen2

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, cache_report

METHODS: dict[str, dict[str, Any]] = {
    "kivi": {"bit_width_inlier": 4, "residual_length": 32},
    "kivi_sink": {"bit_width_inlier": 4, "residual_length": 32},
    "kitty": {"residual_length": 64},
    "xquant": {"xquant_base_bits": 4, "residual_length": 32},
    "minicache": {"minicache_start_frac": 0.0, "minicache_retention_threshold": -1.0, "minicache_max_ctx": 32},
    "amc": {},
    "vecinfer": {"key_codebook_bits": 8, "key_sub_dim": 8, "residual_length": 32, "n_calib_tokens": 64},
    "age_tiered": {"age_recent_boundary": 64, "age_mid_boundary": 96},
    "gear": {"gear_bits": 8, "gear_sparse_fraction": 0.0625},  # whole numbers of outliers in half the heads too
    "adakv": {"residual_length": 64, "adakv_target_avg_bits": 4},  # heads compete within one machine only
    "zipcache": {},
    # Many bits: a layer counts from the first of its process, and its seed with it.
    "turboquant_mse": {"bit_width_inlier": 8},
    "turboquant_prod": {"bit_width_inlier": 8, "bit_width_outlier": 8, "n_calib_tokens": 32},
    "polar": {"bit_width_inlier": 4},  # at 2 bits the two best tokens of the sixth step are equal but for rounding
    "nsnquant": {"nsn_residual_length": 32},
    "qjl": {"residual_length": 32, "n_outlier_channels": 4},
    "turboquant_rvq": {"bit_width_inlier": 3},
    "cachegen": {"cachegen_layer_groups": 1},  # a schedule by depth would give the halves different sizes
    "kvquant": {"n_calib_tokens": 64},
    "skvq": {"skvq_window": 32},
    # heads share their bits within one machine only: equal bits
    "spectral": {"bit_width_inlier": 4, "spectral_key_d_eff": 1, "spectral_val_d_eff": 1, "n_calib_tokens": 64},
    "svdq": {"svdq_rank": 16, "svdq_bit_schedule": (8, 4), "n_calib_tokens": 32},
    "kvtc": {"kvtc_bit_choices": (8,), "residual_length": 32, "n_calib_tokens": 64},
    "xkv": {"xkv_rank": 64, "xkv_max_ctx": 32},  # latents are of the machine's own heads: so many save nothing
    "palu": {},  # every head is a group of its own: groups form within one machine only
    "anchorkv": {"anchorkv_theta": 1.0},  # heads share the budget within one machine only: residuals for all
    "a2ats": {"a2ats_codebook_bits": 4, "a2ats_window": 32},
    "snapkv": {"snap_budget": 64, "snap_obs_window": 16},
    "streaming_llm": {"stream_window_size": 60},
    "knorm": {"knorm_budget": 64},
    "qfilters": {"qfilters_budget": 64, "qfilters_on_low_retention": "ignore"},
    "curdkv": {"curdkv_budget": 64},
    "nestedkv": {"nestedkv_budget": 64, "nestedkv_safeguard_alpha": 1.0},  # heads compete within one machine only
    "h2o": {"h2o_budget": 64},
    "pyramidkv": {"pyramid_budget": 64, "pyramid_beta": 1.0},  # the depth is that of the process's own layers
    "squeeze": {"squeeze_budget": 64, "squeeze_strength": 0.0},  # so are the layers that are compared
    "chunkkv": {"chunkkv_budget": 200},  # chunks are by all heads, processes see their own: nothing is dropped here
    "tova": {"tova_budget": 200},  # its set is by all heads, processes see their own: nothing is dropped here
    "keyformer": {"keyformer_budget": 64, "keyformer_tau": 0.0},  # noise is that of the process's own layers and heads
    "morphkv": {"morphkv_budget": 64},
    "kvzip": {"kvzip_budget": 200},  # layers and heads compete, within one process only: nothing is dropped here
    "cam": {"cam_budget": 64, "cam_merge_gate": False},  # draws are those of the process's own layers and heads
    "rocketkv": {"rocketkv_compression_ratio": 4.0},
}
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}


def build() -> Any:
    """The same random model in every process."""
    mx.random.seed(0)
    model = qwen2.Model(qwen2.ModelArgs.from_dict(MODEL))
    mx.eval(model.parameters())
    return model


def run(model: Any, method: Any, prompt: mx.array, n: int) -> tuple[list[int], int, str]:
    """Greedy tokens, bytes held by this process, and the receipt."""
    config = KVCacheConfig(method=method, **METHODS[method])
    caches = KVCacheBuilder.for_model(model, config, serve_standalone=True)
    steps = generate_step(prompt, model, max_tokens=n, prompt_cache=caches, prefill_step_size=64)
    tokens = [int(token) for token, _ in steps]
    # generate_step leaves one more step in flight: its messages must be over before anything else is sent.
    mx.synchronize(generation_stream)
    report = cache_report(caches)
    return tokens, sum(layer.nbytes - layer.fixed for layer in report.layers), str(report)


def main(split: str, methods: list[str], n: int, show: bool, out: Path | None) -> int:
    group = mx.distributed.init()
    prompt = mx.random.randint(0, MODEL["vocab_size"], (150,), key=mx.random.key(1))
    same = True
    for method in methods:
        tokens, whole, _ = run(build(), method, prompt, n)
        model = build()
        if split == "tensor":
            model.shard(group)
        else:
            model.model.pipeline(group)
        mx.eval(model.parameters())
        found, held, receipt = run(model, method, prompt, n)
        same = same and found == tokens
        row = {"split": split, "method": method, "rank": group.rank(), "of": group.size(), "same": found == tokens}
        line = json.dumps(row | {"bytes": held, "whole": whole})
        print(line, flush=True)
        if out is not None:
            with (out / f"rank{group.rank()}.jsonl").open("a") as file:
                file.write(line + "\n")
        if show:
            print(receipt, flush=True)
    mx.eval(mx.distributed.all_sum(mx.array(1.0)))  # who leaves first would close the sockets of the other
    return 0 if same else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=("tensor", "pipeline"), default="tensor")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--receipt", action="store_true", help="print the receipts")
    parser.add_argument("--out", type=Path, help="folder for the lines, a file per rank: mlx.launch may lose the last")
    options = parser.parse_args()
    sys.exit(main(options.split, options.methods, options.tokens, options.receipt, options.out))
