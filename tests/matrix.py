"""The test matrix: one row per method and setting feeds every property test. A new method adds its rows here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from tests.formulas_adakv import adakv
from tests.formulas_amc import amc
from tests.formulas_anchorkv import anchorkv
from tests.formulas_axes import kvtc, spectral, svdq
from tests.formulas_gear import gear
from tests.formulas_kvzip import latest
from tests.formulas_nestedkv import competing
from tests.formulas_palu import palu
from tests.formulas_zipcache import zipcache
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.store import GROW
from veloxquant_mlx.core.types import SEAL, LayerInfo
from veloxquant_mlx.models.rope import Rotation

Shape = tuple[int, int, int, int]  # B, H, Dk, Dv
REPEATS = 2  # query heads per kv head, unless a test says otherwise


def up(n: int, step: int) -> int:
    return -(-n // step) * step


def due(n: int) -> int:
    """Rows that are packed once ``n`` have left the window: whole groups of ``SEAL``."""
    return max(0, n) // SEAL * SEAL


@dataclass(frozen=True)
class Row:
    """A method with settings small enough for short tests.

    ``held(tokens, shape, itemsize)`` is the formula of the specification: bytes of codes, float rows and positions.
    ``identity`` is the number of tokens up to which nothing is changed. ``channel_bits``: the fewest bits of keys that
    are coded in groups of tokens, so that a group which is cut by a trim is coded anew later. ``prompt_block``: the
    first prompt is coded as one block, so that it matters where it ends. ``value_bits``: like ``channel_bits`` for
    values, where they are packed in blocks. ``indexes``: nothing is encoded, at most an index is added.
    """

    id: str
    method: str
    held: Callable[[int, Shape, int], int]
    fields: dict[str, Any] = field(default_factory=dict)
    identity: int = 0
    channel_bits: int = 0
    value_bits: int = 0
    prompt_block: bool = False
    drops: bool = False
    queries: bool = False
    per_step: bool = False
    indexes: bool = False

    def cache(self, shape: Shape = (1, 2, 64, 64), rope: Rotation | None = None, **fields: Any) -> CompressedKVCache:
        config = KVCacheConfig(**{"method": self.method, **self.fields, **fields})
        return CompressedKVCache(config, LayerInfo(head_dim=shape[2], value_dim=shape[3], rope=rope))


def kivi(bits: int, group: int, residual: int, outlier: int = 0, fit: int = 0, sinks: int = 0) -> Callable:
    """Keys: whole residuals packed. Values: all but a residual. Two float16 parameters per group.

    With ``outlier`` bits for a quarter of the channels: two bytes for the place of each, once ``fit`` tokens are there.
    """

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        block, n = residual or group, dk // 4 if outlier else 0
        keys = max(0, tokens - sinks) // block * block if tokens >= fit else 0
        values = due(tokens - sinks - residual)
        room_k, room_v = up(keys, GROW), up(values, GROW)
        padded = up(up(dv, min(group, up(dv, 32))), 32)
        packed = room_k * ((dk - n) * bits + n * outlier) // 8 + room_k // group * dk * 4 + (2 * n if keys else 0)
        packed += room_v * (padded * bits // 8 + padded // min(group, padded) * 4)
        return b * h * (packed + itemsize * ((tokens - keys) * dk + (tokens - values) * dv))

    return held


def kitty(page: int) -> Callable[[int, Shape, int], int]:
    """32 sinks; keys in whole pages, a quarter of the channels with 2 more bits and a byte each; values but a page."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        keys, values = max(tokens - 32, 0) // page * page, due(tokens - 32 - page)
        packed = keys * (dk * 2 // 8 + dk * 4 // 32 + dk // 4 * 2 // 8) + keys // page * (dk // 4)
        packed += up(values, GROW) * (up(dv, 32) * 2 // 8 + up(dv, 32) // 32 * 4)
        return b * h * (packed + itemsize * ((tokens - keys) * dk + (tokens - values) * dv))

    return held


def rvq(bits: int) -> Callable[[int, Shape, int], int]:
    """Two codes of ``bits`` per number and one float16 rms per row; words are whole."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, *dims = shape
        n = due(tokens)
        row = sum(up(d * 2 * bits, 32) // 8 + 2 for d in dims)
        return b * h * (up(n, GROW) * row + (tokens - n) * sum(dims) * itemsize)

    return held


def codes(dim: int, bits: int) -> int:
    """Bytes of a row of ``dim`` codes, padded to whole words."""
    return up(dim, 32 // math.gcd(32, bits)) * bits // 8


def mse(bits: int) -> Callable[[int, Shape, int], int]:
    """One code per number and one float16 rms per row."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, *dims = shape
        n = due(tokens)
        return b * h * (up(n, GROW) * sum(codes(d, bits) + 2 for d in dims) + (tokens - n) * sum(dims) * itemsize)

    return held


def prod(bits: int, outlier: int, fit: int) -> Callable[[int, Shape, int], int]:
    """A quarter of a key's channels with ``outlier`` bits and 2 bytes each for their places, once they are found; one
    bit per number is a sign. Two float16 sizes per stream of a key, one per value.
    """

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        row = sum(codes(d, n - 1) + codes(d, 1) + 4 for d, n in ((dk // 4, outlier), (dk - dk // 4, bits)))
        values, keys = due(tokens), due(tokens) if tokens >= fit else 0
        packed = up(keys, GROW) * row + (2 * (dk // 4) if keys else 0) + up(values, GROW) * (codes(dv, bits) + 2)
        return b * h * (packed + ((tokens - keys) * dk + (tokens - values) * dv) * itemsize)

    return held


def qjl(bits: int, residual: int, m: int = 0, outliers: int = 0) -> Callable[[int, Shape, int], int]:
    """All but a residual, in groups of 32. Keys: signs (``m`` or one per channel) and a float16 size, outliers with as
    many signs as channels at most and a size of their own, and a byte for each per group. Values: affine.
    """

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        n = max(0, tokens - residual) // 32 * 32
        row = up(m or dk, 32) // 8 + 2 + (up(min(m or dk, dk), 32) // 8 + 2 if outliers else 0)
        row += up(dv, 32) // 32 * (4 * bits + 4)
        packed = up(n, GROW) * row + up(n, GROW) // 32 * outliers
        return b * h * (packed + (tokens - n) * (dk + dv) * itemsize)

    return held


def polar(bits: int, fit: int) -> Callable[[int, Shape, int], int]:
    """Of a block of 16: 8 angles of two bits more, 7 others, whole bytes each per row, and a float16 radius.

    Once ``fit`` tokens are there, float32 codebooks: one with 4 times as many levels, 3 others.
    """

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, *dims = shape
        if tokens < fit:
            return b * h * tokens * sum(dims) * itemsize
        # every dimension of the tests fills whole bytes but for 80
        rows = sum(-(-d // 2 * (bits + 2) // 8) + -(-d * 7 // 16 * bits // 8) + d // 8 for d in dims)
        n = due(tokens)
        return b * (h * (up(n, GROW) * rows + (tokens - n) * sum(dims) * itemsize) + 2 * 4 * (4 + 3) * 2**bits)

    return held


def nsnquant(window: int) -> Callable[[int, Shape, int], int]:
    """Whole windows once a further window has come: 2 bits per number and a float16, half a byte per row and channel of
    a window, and 8 bytes for their ends.
    """

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, *dims = shape
        n = max(tokens - window, 0) // window * window
        room = up(n, math.lcm(GROW, window))
        packed = sum(room * (d // 4 + 2) + room // window * (-(-window // 2) + -(-d // 2) + 8) for d in dims)
        return b * h * (packed + (tokens - n) * sum(dims) * itemsize)

    return held


def cachegen(bits: int, group: int) -> Callable[[int, Shape, int], int]:
    """Whole groups packed, keys and values alike: 8 bits for the first token, a float16 scale for every token."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        sealed = tokens // group * group
        groups = up(sealed, math.lcm(GROW, group)) // group
        token = {n: sum(up(d * n, math.lcm(32, n)) // 8 + 2 for d in (dk, dv)) for n in (8, bits)}
        return b * h * (groups * (token[8] + (group - 1) * token[bits]) + (tokens - sealed) * (dk + dv) * itemsize)

    return held


def skvq(bits: int, window: int, sinks: int, fit: int) -> Callable[[int, Shape, int], int]:
    """As many groups as of 32, of two bytes each, two per channel for its group; nothing before they are found."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, *dims = shape
        n = due(tokens - sinks - window) if tokens >= sinks + fit else 0
        packed = sum(up(n, GROW) * up(d, 32) // 32 * (4 * bits + 2) + (2 * d if n else 0) for d in dims)
        return b * h * (packed + (tokens - n) * sum(dims) * itemsize)

    return held


def kvquant(bits: int, group: int, fit: int) -> Callable[[int, Shape, int], int]:
    """After one sink: whole blocks, 1 % of a token's numbers in 4 bytes each, ranges per channel and per token."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        n = (tokens - 1) // group * group if tokens > fit else 0
        tables = 2 * 2**bits
        packed = (4 * h * dk + 2 * tables) if n else 0
        for d, params in ((dk, 0), (dv, 4)):
            packed += up(n, GROW) * (h * up(d, 32) * bits // 8 + math.ceil(0.01 * h * d) * 4 + params)
        return b * (packed + h * (tokens - n) * (dk + dv) * itemsize)

    return held


def kept(budget: int, window: int | None = None) -> Callable[[int, Shape, int], int]:
    """A policy that just acted: float rows and int32 positions, per head (with an observation window) or shared.

    Per-head policies have room to grow, and hold the window's queries until rows are dropped.
    """

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        n = min(tokens, budget)
        rows = n if window is None else up(n, GROW)
        queries = b * h * REPEATS * min(tokens, window or 0) * dk * itemsize
        index = queries if tokens <= budget else 4 * n * (1 if window is None else b * h)
        return b * h * rows * (dk + dv) * itemsize + index

    return held


def observed(
    budget: int, ring: int = 0, sums: bool = True, shared: bool = False, extra: int = 0, alike: bool = False
) -> Callable:
    """A policy that drops one row per token, at the end of a prompt: float rows with room to grow, the newest ``ring``
    queries, float32 sums per row, and int32 positions (per head, ``shared`` by heads, or ``alike`` in all sequences)
    once rows were dropped.
    """

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        n = min(tokens, budget)
        positions = 0 if tokens <= budget else 4 * n * (1 if alike else b) * (1 if shared else h)
        queries = b * h * REPEATS * min(tokens, ring) * dk * itemsize
        return b * h * (up(n, GROW) * (dk + dv) * itemsize + 4 * n * sums) + positions + queries + extra

    return held


def chunked(budget: int, full: int, window: int) -> Callable[[int, Shape, int], int]:
    """Rows that all heads share: ``full`` of the budget, as whole chunks come; until then the queries of the window."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        n = tokens if tokens <= budget else full
        queries = b * h * REPEATS * min(tokens, window) * dk * itemsize
        return b * h * up(n, GROW) * (dk + dv) * itemsize + (queries if n == tokens else 4 * n * b)

    return held


def aged(recent: int, middle: int, sinks: int) -> Callable[[int, Shape, int], int]:
    """Blocks of 32 after the sinks in 8, 4 and 2 bits by age, two float16 parameters per 32 numbers."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        sealed, mid, old = (max(0, tokens - sinks - age) // 32 * 32 for age in (32, recent, middle))
        row = dk + up(dv, 32)
        packed = sum(up(n, GROW) * (bits + 1) for n, bits in ((sealed - mid, 8), (mid - old, 4), (old, 2)))
        return b * h * (packed * row // 8 + (tokens - sealed) * (dk + dv) * itemsize)

    return held


def vecinfer(bits: tuple[int, int], sub: tuple[int, int], residual: int, fit: int) -> Callable[[int, Shape, int], int]:
    """Rows of indices, 32 at a time; once fitted, float32 factors: per key channel and per head of values."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, *dims = shape
        n = max(0, tokens - residual) // 32 * 32 if tokens >= fit else 0
        row = sum(d // s * width // 8 for d, s, width in zip(dims, sub, bits, strict=True))
        return b * h * (up(n, GROW) * row + (4 * dims[0] + 4) * (n > 0) + (tokens - n) * sum(dims) * itemsize)

    return held


def floats(tokens: int, shape: Shape, itemsize: int) -> int:
    """Rows as they came."""
    b, h, dk, dv = shape
    return b * h * up(tokens, GROW) * (dk + dv) * itemsize


def xkv(bits: int, rank: int) -> Callable[[int, Shape, int], int]:
    """Blocks of 32 once there are 4 tokens per latent, a byte and two float16 per latent each; float16 bases."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        total = 0
        for d, r in ((dk, rank), (dv, math.ceil(1.5 * rank))):
            n = tokens // 32 * 32 if tokens >= 4 * r else 0
            total += up(n, GROW) * r * (bits + 1) // 8 + up(n, GROW) // 32 + (h * d * r * 2 + 8 if n else 0)
            total += h * (tokens - n) * d * itemsize
        return b * total

    return held


def fitted(budget: int) -> Callable[[int, Shape, int], int]:
    """As ``observed``, with the float32 filters that were fitted on all queries held until then."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, _ = shape
        if tokens > budget:
            return observed(budget)(tokens, shape, itemsize) + b * h * 4 * dk
        return observed(budget, ring=tokens, sums=False)(tokens, shape, itemsize)

    return held


def rocketkv(root: float, least: int, window: int, page: int) -> Callable[[int, Shape, int], int]:
    """A prompt's share of float rows, with room to grow, and both ends of every channel per page of keys."""

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        n = min(tokens, max(int(tokens / root), least))
        index = 4 * b * h * n if n < tokens else b * h * REPEATS * min(tokens, window) * dk * itemsize
        pages = up(-(-n // page), 16) * 2 * dk
        return b * h * (up(n, GROW) * (dk + dv) + pages) * itemsize + index

    return held


def a2ats(bits: int) -> Callable[[int, Shape, int], int]:
    """Float rows with room to grow, a code per 8 numbers of a key, float16 codebooks and a float32 matrix per head.

    Up to 63 tokens, all queries instead of the last two, and a byte for each.
    """

    def held(tokens: int, shape: Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        rows = b * h * up(tokens, GROW) * (dk + dv) * itemsize
        if tokens < 64:
            return rows + b * h * REPEATS * tokens * dk * itemsize + tokens
        return rows + b * h * (tokens * up(dk // 8 * bits, 8) // 8 + 2 * dk * 2**bits + 4 * dk * dk)

    return held


ROWS = (
    Row("kivi-2", "kivi", kivi(2, 32, 128), {"bit_width_inlier": 2}, identity=127, channel_bits=2),
    Row(
        "kivi-4-r32",
        "kivi",
        kivi(4, 32, 32),
        {"bit_width_inlier": 4, "residual_length": 32},
        identity=31,
        channel_bits=4,
    ),
    Row(
        "kivi-3-8-g16",
        "kivi",
        kivi(3, 16, 32, outlier=8, fit=40),
        {
            "bit_width_inlier": 3,
            "bit_width_outlier": 8,
            "n_calib_tokens": 40,
            "kivi_group_size": 16,
            "residual_length": 32,
        },
        identity=31,
        channel_bits=3,
    ),
    Row(
        "kivi-8-r0",
        "kivi",
        kivi(8, 64, 0),
        {"bit_width_inlier": 8, "kivi_group_size": 64, "residual_length": 0},
        channel_bits=8,
    ),
    Row("kivi_sink", "kivi_sink", kivi(2, 32, 32, sinks=5), {"residual_length": 32}, identity=36, channel_bits=2),
    Row("kitty", "kitty", kitty(64), {"residual_length": 64}, identity=95, channel_bits=2),
    Row("gear", "gear", gear(0.01), channel_bits=2, prompt_block=True),
    Row("adakv", "adakv", adakv(64), {"residual_length": 64}, identity=63, channel_bits=2, value_bits=2),
    Row("zipcache", "zipcache", zipcache(4, 2, 0.2), channel_bits=2, prompt_block=True, queries=True),
    Row("mse-2", "turboquant_mse", mse(2)),
    Row(
        "prod-3-out",
        "turboquant_prod",
        prod(3, 4, 64),
        {"bit_width_inlier": 3, "bit_width_outlier": 4, "n_calib_tokens": 64},
    ),
    Row(
        "nsnquant",
        "nsnquant",
        nsnquant(32),
        {"nsn_residual_length": 32},
        identity=63,
        channel_bits=2,
        value_bits=2,
    ),
    Row("polar", "polar", polar(2, 40), {"n_calib_tokens": 40}, identity=39),
    Row("qjl", "qjl", qjl(2, 64), {"residual_length": 64}, identity=95),
    Row(
        "qjl-out",
        "qjl",
        qjl(3, 32, m=100, outliers=8),
        {"bit_width_inlier": 3, "jl_dim": 100, "n_outlier_channels": 8, "residual_length": 32},
        identity=63,
        channel_bits=1,
    ),
    Row("rvq-1", "turboquant_rvq", rvq(1), {"bit_width_inlier": 1}),
    Row("rvq-2", "turboquant_rvq", rvq(2), {"bit_width_inlier": 2}),
    Row("rvq-3", "turboquant_rvq", rvq(3), {"bit_width_inlier": 3}),
    Row("rvq-4", "turboquant_rvq", rvq(4), {"bit_width_inlier": 4}),
    Row(
        "cachegen-3-g10",
        "cachegen",
        cachegen(3, 10),
        {"cachegen_bits": 3, "cachegen_group_size": 10},
        identity=9,
    ),
    Row("skvq", "skvq", skvq(2, 32, 5, 64), {"skvq_window": 32}, identity=68),
    Row("kvquant", "kvquant", kvquant(3, 32, 64), {"n_calib_tokens": 64}, identity=64),
    Row(
        "age_tiered",
        "age_tiered",
        aged(64, 128, 5),
        {"age_recent_boundary": 50, "age_mid_boundary": 128},
        identity=68,
        channel_bits=2,
    ),
    Row("spectral-1", "spectral", spectral(64), {"bit_width_inlier": 1, "n_calib_tokens": 64}, identity=63),
    Row(
        "svdq",
        "svdq",
        svdq((8, 4, 2, 1, 1, 0, 0, 0), 16, 64),
        {"svdq_rank": 16, "n_calib_tokens": 64},
        identity=63,
        channel_bits=1,
    ),
    Row(
        "kvtc",
        "kvtc",
        kvtc(144, 64, 32),
        {"kvtc_bit_budget": 144, "kvtc_bit_choices": (0, 4), "residual_length": 32, "n_calib_tokens": 64},
        identity=67,
    ),
    Row(
        "palu",
        "palu",
        palu(8, 2),
        {"palu_rank": 8, "palu_n_head_groups": 2},
        identity=32,
        channel_bits=1,
        value_bits=1,
        prompt_block=True,
    ),
    Row("xkv", "xkv", xkv(4, 16), {"xkv_rank": 16}, identity=63, channel_bits=4, value_bits=4, prompt_block=True),
    Row("amc", "amc", amc(0.2, 0.3, 32, 64), {}, identity=63, channel_bits=1, value_bits=1, prompt_block=True),
    Row(
        "vecinfer",
        "vecinfer",
        vecinfer((8, 8), (8, 8), 32, 64),
        {"key_codebook_bits": 8, "key_sub_dim": 8, "residual_length": 32, "n_calib_tokens": 64},
        identity=63,
    ),
    # A cache by itself shares with nobody; tests/properties/test_joint.py runs groups.
    Row(
        "xquant",
        "xquant",
        kivi(2, 32, 32),
        {"residual_length": 32},
        identity=31,
        channel_bits=2,
    ),
    # A cache by itself is merged with none: floats with room to grow. In models, two thirds of the rows are merged.
    Row(
        "minicache",
        "minicache",
        floats,
        {"minicache_start_frac": 0.0, "minicache_retention_threshold": -0.1, "minicache_max_ctx": 64},
        identity=300,
        indexes=True,
    ),
    Row(
        "anchorkv",
        "anchorkv",
        anchorkv(0.3, 16, 0.1),
        {"anchorkv_theta": 0.3, "anchorkv_window": 16, "anchorkv_anchor_frac": 0.1},
        prompt_block=True,
        queries=True,
    ),
    Row(
        "a2ats",
        "a2ats",
        a2ats(4),
        {"a2ats_codebook_bits": 4, "a2ats_window": 32},
        identity=63,
        prompt_block=True,
        queries=True,
        indexes=True,
    ),
    Row(
        "snapkv-64",
        "snapkv",
        kept(64, window=8),
        {"snap_budget": 64, "snap_obs_window": 8},
        identity=64,
        drops=True,
        queries=True,
    ),
    Row(
        "snapkv-paper",
        "snapkv",
        kept(100, window=16),
        {"snap_budget": 100, "snap_obs_window": 16, "snap_n_sink": 0, "snap_batched_scoring": False},
        identity=100,
        drops=True,
        queries=True,
    ),
    Row(
        "streaming-60",
        "streaming_llm",
        kept(64),
        {"stream_window_size": 60},
        identity=64,
        drops=True,
    ),
    Row("knorm", "knorm", observed(64), {"knorm_budget": 64}, identity=64, drops=True, per_step=True),
    Row(
        "qfilters",
        "qfilters",
        fitted(64),
        {"qfilters_budget": 64, "qfilters_on_low_retention": "ignore"},
        identity=64,
        drops=True,
        queries=True,
        per_step=True,
    ),
    Row("curdkv", "curdkv", observed(64, sums=False), {"curdkv_budget": 64}, identity=64, drops=True),
    # Not for its queries: attention must know that heads are of different lengths.
    Row("nestedkv", "nestedkv", competing(64), {"nestedkv_budget": 64}, identity=64, drops=True, queries=True),
    # Caches by themselves cannot run the reconstruction pass; tests/models/test_kvzip.py does.
    Row(
        "kvzip-latest",
        "kvzip",
        latest(64),
        {"kvzip_probe": "latest", "kvzip_budget": 64},
        identity=64,
        drops=True,
        queries=True,
    ),
    Row(
        "pyramidkv",
        "pyramidkv",
        kept(80, window=32),
        {"pyramid_budget": 80, "pyramid_beta": 1.4},
        identity=80,
        drops=True,
        queries=True,
    ),
    Row(
        "squeeze",
        "squeeze",
        observed(80),
        {"squeeze_budget": 80},
        identity=80,
        drops=True,
        queries=True,
        per_step=True,
    ),
    Row(
        "chunkkv",
        "chunkkv",
        chunked(60, 3 + 32 + 24, window=32),
        {"chunkkv_budget": 60, "chunkkv_chunk_size": 3, "chunkkv_n_sink": 3, "chunkkv_reuse_layers": 2},
        identity=60,
        drops=True,
        queries=True,
    ),
    Row("h2o", "h2o", observed(80), {"h2o_budget": 80}, identity=80, drops=True, queries=True, per_step=True),
    Row(
        "tova",
        "tova",
        observed(64, ring=1, sums=False, shared=True),
        {"tova_budget": 64},
        identity=64,
        drops=True,
        queries=True,
        per_step=True,
    ),
    Row(
        "keyformer",
        "keyformer",
        observed(70, extra=4),  # how many steps were decoded
        {"keyformer_budget": 70, "keyformer_recent": 20, "keyformer_tau_end": 2.0, "keyformer_anneal_steps": 30},
        identity=70,
        drops=True,
        queries=True,
        per_step=True,
    ),
    Row(
        "morphkv",
        "morphkv",
        observed(64, ring=8, sums=False),
        {"morphkv_budget": 64},
        identity=64,
        drops=True,
        queries=True,
        per_step=True,
    ),
    Row(
        "cam",
        "cam",
        observed(64, shared=True, alike=True),
        {"cam_budget": 64},
        identity=64,
        drops=True,
        queries=True,
        per_step=True,
    ),
    Row(
        "rocketkv",
        "rocketkv",
        rocketkv(32**0.5, 13, 8, 3),
        {"rocketkv_compression_ratio": 32.0, "rocketkv_obs_window": 8, "rocketkv_page_size": 3},
        identity=13,
        drops=True,
        queries=True,
    ),
)
IDS = [row.id for row in ROWS]
SHAPES: dict[str, Shape] = {
    "D64": (1, 2, 64, 64),
    "D80": (2, 3, 80, 80),
    "D96": (1, 1, 96, 96),
    "D128": (1, 2, 128, 128),
    "D256": (1, 1, 256, 256),
    "Dk192-Dv128": (1, 2, 192, 128),
    "Dk64-Dv80": (2, 1, 64, 80),
}
DTYPES = {"fp16": mx.float16, "bf16": mx.bfloat16, "fp32": mx.float32}


@dataclass(frozen=True)
class Tensors:
    """Seeded queries ``(B, H * R, T, Dk)``, keys ``(B, H, T, Dk)`` and values ``(B, H, T, Dv)``."""

    q: mx.array
    k: mx.array
    v: mx.array

    def part(self, start: int, stop: int) -> Tensors:
        return Tensors(*(x[:, :, start:stop] for x in (self.q, self.k, self.v)))


def tensors(
    tokens: int, shape: Shape = (1, 2, 64, 64), repeats: int = REPEATS, dtype: mx.Dtype = mx.float32, seed: int = 0
) -> Tensors:
    """Random data with a few strong key channels, as models have them."""
    b, h, dk, dv = shape
    keys = [mx.random.key(seed + i) for i in range(3)]
    scale = mx.where(mx.arange(dk) % 16 == 3, 5.0, 1.0)
    q = mx.random.normal((b, h * repeats, tokens, dk), key=keys[0])
    k = mx.random.normal((b, h, tokens, dk), key=keys[1]) * scale
    v = mx.random.normal((b, h, tokens, dv), key=keys[2])
    return Tensors(*(x.astype(dtype) for x in (q, k, v)))


def feed(cache: Any, data: Tensors, chunks: Sequence[int], scale: float = 0.125) -> mx.array:
    """Run the tokens through update and attention in chunks, as a model does; the outputs ``(B, Hq, T, Dv)``."""
    outs, at = [], 0
    for n in chunks:
        now = data.part(at, at + n)
        cache.update_and_fetch(now.k, now.v)
        outs.append(cache.attend(now.q, scale=scale, mask="causal" if n > 1 else None))
        mx.eval(outs[-1], cache.state)
        at += n
    assert at == data.k.shape[2]
    return mx.concatenate(outs, axis=2)


def split(tokens: int, size: int) -> list[int]:
    """``tokens`` in chunks of ``size``."""
    return [size] * (tokens // size) + ([tokens % size] if tokens % size else [])


def identical(a: mx.array, b: mx.array) -> bool:
    """Equal dtype, shape and bits; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a, b, equal_nan=True))


def stored_bytes(cache: CompressedKVCache) -> int:
    """Bytes held without the constants of the method (and the one-byte note on the last chunk)."""
    return sum(n for kind, n in cache.held_bytes().items() if kind != "fixed")


def same_state(a: Any, b: Any) -> bool:
    """Whether two caches hold the same arrays, bit for bit."""
    mine, theirs = a.keys or [], b.keys or []
    return len(mine) == len(theirs) and all(identical(x, y) for x, y in zip(mine, theirs, strict=True))


def same_rows(a: CompressedKVCache, b: CompressedKVCache) -> bool:
    """As ``same_state``; sums over queries, which two chunkings add in different orders, within 1e-4 of their size."""
    mine, theirs = a._store.arrays(), b._store.arrays()
    return mine.keys() == theirs.keys() and all(
        bool(mx.allclose(x, theirs[name], rtol=1e-4, atol=1e-5))
        if name.startswith("row.")
        else identical(x, theirs[name])
        for name, x in mine.items()
    )
