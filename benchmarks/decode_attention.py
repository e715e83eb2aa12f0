"""One decode step of attention over a long history, as a ratio to MLX's fused attention on 16-bit rows in the same run.

Also mlx_lm's own quantised attention at 4 bits, and the copy bandwidth of the device. The history is random. A time is
what a user pays: calls are built lazily in groups, as the layers of a model are, and each group is evaluated at once;
the median over the groups counts. A call has a fixed cost, so the slope between the two longest histories is reported
too. Errors are relative (of norms), against the float32 reference on the very rows that the cache holds. On a CPU
float32 stands in for 16 bits, which MLX computes slowly there.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.attention import entry, reference
from veloxquant_mlx.attention.kernels import Kernels, launch
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.store import Store
from veloxquant_mlx.codecs.affine import TokenAffine
from veloxquant_mlx.core.types import LayerInfo, Recipe, Stream

from . import common, plot

METHODS = common.caches("kivi 4-bit", "kivi 2-bit", "turboquant_mse 4", "turboquant_mse 2", "turboquant_rvq 2")
BASE, STOCK, AFFINE = "mlx fused attention", "mlx_lm 4-bit", "token affine 4-bit"
KV_HEADS, QUERY_HEADS, DIM = 8, 32, 128
SCALE = DIM**-0.5
CHUNK = 2**20  # rows of all heads that are encoded at a time: float32 copies take 512 MiB for each of K and V
ERRORS = 32768  # longest history that errors are measured on, of 2**18 tokens of all sequences at most
STOCK_MOST = 2**18  # tokens of all sequences beyond which mlx_lm's quantised attention takes too long
SECONDS = 0.6  # for the rounds of one call, of which there are five at least


class Rival(NamedTuple):
    """A call to measure, the bytes it reads, how it is computed, and the rows in float32 that it stands for."""

    call: Callable[[], mx.array]
    nbytes: int
    path: str
    rows: Callable[[], tuple[mx.array, mx.array]]


def microseconds(call: Callable[[], mx.array], rounds: int, inner: int) -> float:
    """Median time of one of ``inner`` calls that are evaluated together."""
    for _ in range(2):  # the first compiles, and tries a kernel
        mx.eval(call())
    times: list[float] = []
    while len(times) < rounds and (len(times) < 5 or sum(times) * inner < SECONDS):
        mx.synchronize()
        began = time.perf_counter()
        mx.eval([call() for _ in range(inner)])
        mx.synchronize()
        times.append((time.perf_counter() - began) / inner)
    return statistics.median(times) * 1e6


def bandwidth(nbytes: int, rounds: int) -> float:
    """Bytes per second, read and written, of copying ``nbytes``."""
    big = mx.zeros((nbytes // 4,), mx.uint32)
    mx.eval(big)
    took = microseconds(lambda: big + 1, rounds, 1)
    return 2 * big.nbytes / took * 1e6


def rows(batch: int, start: int, count: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Random keys and values ``(B, H, count, D)``."""
    both = mx.random.normal((2, batch, KV_HEADS, count, DIM), dtype=dtype, key=mx.random.key(start))
    return both[0], both[1]


def filled(fields: dict[str, Any] | None, batch: int, tokens: int, dtype: mx.Dtype) -> CompressedKVCache | Store:
    """A cache (``fields`` None: a store of 4-bit rows in groups of 64) fed in chunks, then one token alone."""
    holder: CompressedKVCache | Store
    if fields is None:
        holder = Store(Recipe(Stream(TokenAffine(4, 64, dim=DIM)), Stream(TokenAffine(4, 64, dim=DIM))))
    else:
        info = LayerInfo(head_dim=DIM, value_dim=DIM, kv_heads=KV_HEADS)
        holder = CompressedKVCache(KVCacheConfig(**fields), info)
    chunk = min(32768, max(256, CHUNK // (batch * KV_HEADS)))
    for start in range(0, tokens - 1, chunk):
        _append(holder, *rows(batch, start, min(chunk, tokens - 1 - start), dtype), start)
        if isinstance(holder, Store):
            holder.seal()
        else:
            holder.settle()
        mx.eval(list(holder.arrays().values()))
    _append(holder, *rows(batch, tokens, 1, dtype), tokens - 1)
    mx.eval(list(holder.arrays().values()))
    return holder


def _append(holder: CompressedKVCache | Store, keys: mx.array, values: mx.array, start: int) -> None:
    if isinstance(holder, CompressedKVCache):
        holder.append(keys, values)
    else:
        holder.append(keys, values, start)


def plain(q: mx.array, tokens: int) -> Rival:
    """MLX's fused attention on the rows as they are."""
    keys, values = rows(q.shape[0], 0, tokens, q.dtype)
    mx.eval(keys, values)

    def call() -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE)

    exact = lambda: (keys.astype(mx.float32), values.astype(mx.float32))  # noqa: E731
    return Rival(call, keys.nbytes + values.nbytes, "mlx", exact)


def stock(q: mx.array, tokens: int) -> Rival:
    """mlx_lm's attention over what its ``QuantizedKVCache(group_size=64, bits=4)`` holds."""
    keys, values = (mx.quantize(x, group_size=64, bits=4) for x in rows(q.shape[0], 0, tokens, q.dtype))
    mx.eval(keys, values)

    def call() -> mx.array:  # which scales the queries in place
        return quantized_scaled_dot_product_attention(q * 1, keys, values, SCALE, None, group_size=64, bits=4)

    def exact() -> tuple[mx.array, mx.array]:
        wide = [mx.dequantize(*x, group_size=64, bits=4).astype(mx.float32) for x in (keys, values)]
        return wide[0], wide[1]

    return Rival(call, sum(a.nbytes for a in (*keys, *values)), "mlx_lm", exact)


def ours(q: mx.array, tokens: int, fields: dict[str, Any] | None, kernels: bool | None = None) -> Rival:
    """A cache's attention (``fields`` None: a store's), with kernels where there are any, without (False)."""
    fields = fields if fields is None else fields | {"use_metal_kernels": kernels}
    held = filled(fields, q.shape[0], tokens, q.dtype)
    if isinstance(held, CompressedKVCache):
        call, store = partial(held.attend, q, scale=SCALE), held.store
        mx.eval(call())
        notes = held.describe()
        path = "; ".join([*notes["attention"], *notes["notes"]])
    else:
        store, own = held, Kernels(KVCacheConfig(use_metal_kernels=kernels))
        path = entry.attention(store, q, SCALE, None, None, kernels=own)[1].value
        path = "; ".join([path, *sorted(own.reasons)])

        def call() -> mx.array:
            return entry.attention(store, q, SCALE, None, None, kernels=own)[0]

    exact = lambda: (store.keys.dense(dtype=mx.float32), store.values.dense(dtype=mx.float32))  # noqa: E731
    return Rival(call, sum(a.nbytes for a in store.arrays().values()), path, exact)


def error(rival: Rival, q: mx.array) -> float:
    """Relative error of norms against the float32 reference on the rows that the rival holds."""
    wanted = reference.attention(q.astype(mx.float32), *rival.rows(), SCALE, None, None)
    got = rival.call().astype(mx.float32)
    off: Any = mx.sqrt(mx.square(got - wanted).sum() / mx.square(wanted).sum()).item()
    return off


def measured(batch: int, tokens: int, args: argparse.Namespace, dtype: mx.Dtype) -> list[dict[str, Any]]:
    """The rows of one length and batch."""
    q = mx.random.normal((batch, QUERY_HEADS, 1, DIM), dtype=dtype, key=mx.random.key(7))
    every: dict[str, Callable[[], Rival]] = {BASE: partial(plain, q, tokens)}
    if batch * tokens <= STOCK_MOST:
        every[STOCK] = partial(stock, q, tokens)
    fields: dict[str, dict[str, Any] | None] = {AFFINE: None, **METHODS}
    every |= {name: partial(ours, q, tokens, f) for name, f in fields.items()}
    if tokens == args.without_kernels and batch == 1 and launch.backend() is not None:
        every |= {f"{name}, no kernels": partial(ours, q, tokens, f, False) for name, f in fields.items()}
    out, base = [], 0.0
    for name, make in every.items():
        if args.only and name != BASE and not any(word in name for word in args.only):
            continue
        rival = make()
        took = microseconds(rival.call, args.rounds, args.inner)
        base = took if name == BASE else base
        off = error(rival, q) if tokens <= ERRORS and batch * tokens <= 2**18 else None
        row = {"batch": batch, "tokens": tokens, "cache": name, "microseconds": round(took, 1)}
        row |= {"ratio": round(base / took, 3), "TB/s": round(rival.nbytes / took / 1e6, 3)}
        row |= {"bits_per_number": round(8 * rival.nbytes / (2 * batch * KV_HEADS * tokens * DIM), 3)}
        row |= {"error": None if off is None else float(f"{off:.2g}"), "path": rival.path}
        out.append(row)
        print(", ".join(f"{value}" for value in row.values()), flush=True)
        del rival
        gc.collect()
        mx.clear_cache()
    return out


def slopes(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What 1,000 tokens more cost, of one sequence between its two longest histories: free of a call's fixed cost."""
    at = {(row["cache"], row["tokens"]): row["microseconds"] for row in found if row["batch"] == 1}
    lengths = sorted({tokens for _, tokens in at})[-2:]
    if len(lengths) < 2:
        return []
    short, long = lengths
    slope = {
        name: (at[name, long] - took) / (long - short)
        for (name, n), took in at.items()
        if n == short and (name, long) in at
    }
    return [
        {
            "cache": name,
            "from": short,
            "to": long,
            "us per 1000 tokens": round(1000 * us, 4),
            "ratio": round(slope[BASE] / us, 3) if us > 0 else None,
        }
        for name, us in slope.items()
    ]


def chart(found: list[dict[str, Any]]) -> str:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in found:
        lines = panels.setdefault(f"batch {row['batch']}", {})
        if "no kernels" not in row["cache"]:
            lines.setdefault(row["cache"], []).append((row["tokens"], row["ratio"]))
    title = f"Speed of one decode step of attention, {BASE} = 1 ({common.machine()['name']})"
    return plot.svg(title, "tokens of history", panels)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768, 131072, 262144, 1048576])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--most-gib", type=float, default=24.0, help="leave out what takes more as 16-bit K and V")
    parser.add_argument("--without-kernels", type=int, default=32768, help="the length also measured without kernels")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of the caches to measure")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inner", type=int, default=16, help="calls evaluated together")
    parser.add_argument("--copy-mib", type=int, default=2048, help="size of the array that is copied")
    args = parser.parse_args(words)
    back = launch.backend() or "cpu"
    dtype = mx.float32 if back == "cpu" else mx.float16
    copied = bandwidth(args.copy_mib * common.MIB, args.rounds)
    print(f"copy bandwidth: {copied / 1e12:.3f} TB/s read and written", flush=True)
    found: list[dict[str, Any]] = []
    name = f"decode_attention_{back}"
    settings = {"dtype": str(dtype), "rounds": args.rounds, "inner": args.inner, "copy TB/s": copied / 1e12}
    for batch in sorted(args.batches):
        for tokens in sorted(args.lengths):
            if batch * tokens * KV_HEADS * DIM * 4 <= args.most_gib * 2**30:
                found += measured(batch, tokens, args, dtype)
                common.save(name, settings | {"slopes": slopes(found)}, found)  # a run may be cut short
    common.show("decode attention, 32 query heads, 8 kv heads, head size 128", found)
    if steep := slopes(found):
        common.show("slope between the two longest histories, batch 1", steep)
    (common.RESULTS / f"{name}.svg").write_text(chart(found), encoding="utf-8")


if __name__ == "__main__":
    main()
