"""Decode speed and prefill memory of a Llama-shaped model with random 4-bit weights, cache against cache in one run.

The model is mlx_lm's; its weights are random packed words with small scales, as what it says does not matter here.
Decoding goes through mlx_lm's ``generate_step`` as in real use. The history before it is not prefilled: every layer's
cache is fed random rows. Prefill is real, through ``generate_step``, of random tokens; its peak is counted above the
weights. Where the device cannot multiply many rows by 4-bit weights, prefill is measured with 16-bit weights.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.models.llama import Model, ModelArgs

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.attention.kernels import launch
from veloxquant_mlx.cache.layer import CompressedKVCache

from . import common

BASE, STOCK = "mlx_lm, uncompressed", "mlx_lm 4-bit"
METHODS = common.caches("kivi 4-bit", "turboquant_mse 4", "turboquant_rvq 2")
CHUNK = 32768  # rows of history that are encoded at a time
STEP = 2048  # tokens that mlx_lm prefills at a time


class Shape(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    mlp: int
    vocab: int  # the real models' 128,256 are cut: the last product is the same for every cache


SHAPES = {
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 32768),
    "3b": Shape(28, 3072, 24, 8, 128, 8192, 32768),
    "tiny": Shape(2, 128, 4, 2, 64, 256, 512),
}


def build(shape: Shape, dtype: mx.Dtype, packed: bool = True) -> Any:
    """A model of that shape: 4-bit weights in groups of 64, or weights in ``dtype``."""
    args = ModelArgs(
        model_type="llama",
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        rms_norm_eps=1e-5,
        vocab_size=shape.vocab,
        rope_theta=500000.0,
        max_position_embeddings=2**20,
        tie_word_embeddings=False,
    )
    model: Any = Model(args)
    if packed:
        nn.quantize(model, group_size=64, bits=4)  # nothing is computed: arrays are lazy, and replaced below
    for _, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            _fill_packed(module, dtype)
        elif isinstance(module, nn.Linear | nn.Embedding):
            shape_of = module.weight.shape
            module.weight = mx.random.normal(shape_of, dtype=dtype, scale=shape_of[1] ** -0.5)
        elif isinstance(module, nn.RMSNorm):
            module.weight = mx.ones(module.weight.shape, dtype)
        else:
            continue  # a module of modules: its arrays are not all replaced yet
        mx.eval(module.parameters())
    model.eval()
    return model


def _fill_packed(module: Any, dtype: mx.Dtype) -> None:
    """Codes 0 to 15, centred, with the deviation of usual weights."""
    out, words = module.weight.shape
    scale = (8 * words) ** -0.5 / math.sqrt((16**2 - 1) / 12)
    module.weight = _words((out, words))
    module.scales = mx.full((out, words // 8), scale, dtype)
    module.biases = mx.full((out, words // 8), -7.5 * scale, dtype)


def make(label: str, model: Any) -> list[Any]:
    """Empty caches for the model."""
    if label in METHODS:
        return KVCacheBuilder.for_model(model, KVCacheConfig(**METHODS[label]), serve_standalone=True)
    return [KVCache() if label == BASE else QuantizedKVCache(group_size=64, bits=4) for _ in model.layers]


def fill(caches: list[Any], shape: Shape, tokens: int, dtype: mx.Dtype) -> None:
    """Random rows for every layer, as if ``tokens`` had been read."""
    lead = (1, shape.kv_heads)
    for layer, cache in enumerate(caches):
        if isinstance(cache, QuantizedKVCache):
            cache.state = (*(_packed_rows((*lead, tokens), shape.dim, dtype) for _ in range(2)), tokens, 64, 4)
            mx.eval(cache.keys, cache.values)
            continue
        ours = isinstance(cache, CompressedKVCache)
        chunk = CHUNK if ours else tokens  # mlx_lm's cache would be copied for every chunk
        for start in range(0, tokens, chunk):
            key = mx.random.key(layer * 1000003 + start)
            rows = mx.random.normal((2, *lead, min(chunk, tokens - start), shape.dim), dtype=dtype, key=key)
            if ours:
                cache.append(rows[0], rows[1])
                cache.settle()
            else:
                cache.update_and_fetch(rows[0], rows[1])
            mx.eval(cache.state)
        mx.clear_cache()


def _packed_rows(lead: tuple[int, ...], dim: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Words, scales and biases of random 4-bit rows in groups of 64."""
    scales = mx.full((*lead, dim // 64), 0.2, dtype)
    return _words((*lead, dim // 8)), scales, scales * -7.5


def _words(shape: tuple[int, ...]) -> mx.array:
    return mx.random.randint(-(2**31), 2**31 - 1, shape, mx.int32).view(mx.uint32)


def held(caches: list[Any]) -> int:
    return sum(cache.nbytes for cache in caches)


def path(caches: list[Any]) -> str:
    """How attention was computed, as the receipt of the first layer says it."""
    if not isinstance(caches[0], CompressedKVCache):
        return "mlx_lm"
    found = caches[0].describe()
    return "; ".join([*found["attention"], *found["notes"]])


def decode(model: Any, shape: Shape, label: str, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second after ``length`` tokens."""
    dtype = model.model.norm.weight.dtype
    caches, began = make(label, model), time.perf_counter()
    fill(caches, shape, length, dtype)
    filled = time.perf_counter() - began
    made = generate_step(
        mx.array([1]), model, max_tokens=args.warm + args.tokens + 1, prompt_cache=caches, prefill_step_size=STEP
    )
    for _ in range(args.warm):
        next(made)
    times = [time.perf_counter()]
    for _ in range(args.tokens):
        next(made)
        times.append(time.perf_counter())
    made.close()
    mx.synchronize()
    took = (times[-1] - times[0]) / args.tokens
    each = sorted(b - a for a, b in pairwise(times))
    return {
        "tokens/s": 1 / took,
        "ms/token": 1e3 * took,
        "median ms": 1e3 * each[len(each) // 2],
        "cache MiB": held(caches) / common.MIB,
        "seconds to fill": filled,
        "path": path(caches),
    }


def prefill(model: Any, shape: Shape, label: str, length: int) -> dict[str, Any]:
    """Peak memory above the weights of reading ``length`` tokens, the first answer included."""
    ids = mx.random.randint(0, shape.vocab, (length,), key=mx.random.key(3))
    mx.eval(ids)
    caches = make(label, model)
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    for _ in generate_step(ids, model, max_tokens=1, prompt_cache=caches, prefill_step_size=STEP):
        pass
    mx.synchronize()
    return {
        "peak MiB": (mx.get_peak_memory() - before) / common.MIB,
        "cache MiB": held(caches) / common.MIB,
        "seconds": time.perf_counter() - began,
        "path": path(caches),
    }


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured, or why it could not be."""
    try:
        found = measure()
    except (RuntimeError, ValueError, NotImplementedError) as failure:
        found = {"error": f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}"}
    gc.collect()  # outside of the handler, which holds the caches
    mx.clear_cache()
    return found


def table(rows: list[dict[str, Any]], names: tuple[str, ...], against: str) -> list[dict[str, Any]]:
    """Rows with the same columns, with the ratio of ``against`` to the uncompressed cache's; errors in their place."""
    base = {row["length"]: row.get(against) for row in rows if row["cache"] == BASE}
    out = []
    for row in rows:
        of, mine = base.get(row["length"]), row.get(against)
        ratio = mine / of if of and mine else "-"
        said = row.get("error") or row["path"]
        cells = {name: row.get(name, "-") for name in names}
        out.append({"cache": row["cache"], "length": row["length"], **cells, "ratio": ratio, "path": said})
    return out


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    every = [BASE, *METHODS, STOCK]
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 131072], help="histories before decoding")
    parser.add_argument("--prefill", type=int, nargs="*", default=[32768], help="prompts whose memory is measured")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of the caches to measure")
    parser.add_argument("--warm", type=int, default=8, help="tokens decoded before the clock starts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded: enough for kivi to pack once")
    args = parser.parse_args(words)
    back, shape = launch.backend() or "cpu", SHAPES[args.shape]
    # With random weights MLX's 4-bit products overflow float16 in the fifth layer, whatever the cache.
    dtype = mx.float32 if back == "cpu" else mx.bfloat16
    labels = [name for name in every if not args.only or any(word in name for word in args.only)]
    began = time.perf_counter()
    mx.random.seed(0)
    model = build(shape, dtype)
    weights = mx.get_active_memory()
    print(f"{args.shape}: {weights / common.MIB:.0f} MiB of weights in {time.perf_counter() - began:.1f} s", flush=True)
    settings: dict[str, Any] = {"shape": args.shape, **shape._asdict(), "dtype": str(dtype), "weights": "4-bit, random"}
    settings |= {"history": "random rows put into every layer's cache; not prefilled", "prefill step": STEP}
    settings |= {"warm": args.warm, "tokens": args.tokens, "prefill weights": "4-bit, random"}
    decoded: list[dict[str, Any]] = []
    read: list[dict[str, Any]] = []

    def keep(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
        rows.append(row)
        print(
            ", ".join(f"{value:.5g}" if isinstance(value, float) else f"{value}" for value in row.values()), flush=True
        )
        both = [{"measured": "decode", **r} for r in decoded] + [{"measured": "prefill", **r} for r in read]
        common.save(f"end_to_end_{args.shape}_{back}", settings, both)  # a run may be cut short

    for length in args.lengths:
        for label in labels:
            found = attempt(lambda label=label, length=length: decode(model, shape, label, length, args))
            keep(decoded, {"cache": label, "length": length, **found})
    if args.prefill and "error" in (found := attempt(lambda: prefill(model, shape, BASE, STEP + 1))):
        print(f"4-bit weights cannot prefill here ({found['error']}); 16-bit weights from here on", flush=True)
        settings["prefill weights"] = f"{dtype}, random, because of 4-bit ones: {found['error']}"
        model = None
        gc.collect()
        mx.clear_cache()
        model = build(shape, dtype, packed=False)
    for length in args.prefill:
        for label in labels:
            attempt(lambda label=label: prefill(model, shape, label, 2 * STEP + 1))  # compiles what a history needs
            found = attempt(lambda label=label, length=length: prefill(model, shape, label, length))
            keep(read, {"cache": label, "length": length, **found})
    if decoded:
        common.show("decode", table(decoded, ("tokens/s", "ms/token", "median ms", "cache MiB"), "tokens/s"))
    if read:
        common.show("prefill: peak above the weights", table(read, ("peak MiB", "cache MiB", "seconds"), "peak MiB"))


if __name__ == "__main__":
    main()
