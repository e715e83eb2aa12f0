"""The part of decode attention that CUDA's tensor cores take: rows whose keys and values are packed (``tensor.h``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from . import launch
from .launch import WARPS, Launch

if TYPE_CHECKING:
    from ...codecs.base import Readable
    from ..masks import Mask
    from .sides import Side

DIMS = (64, 128, 256)
ROWS = 16  # query rows per kv head: one operand of the products
LEAST = 512  # packed rows from which they pay
STAGES = 2  # tiles of codes that are there or on their way
GROUPS = 528  # groups of lanes that a call is split into: four for each multiprocessor of the largest GPUs


def readable(keys: Side, values: Side) -> bool:
    """Whether there is a kernel for rows packed like these."""
    kinds = ("token_affine", "codebook")
    if keys.codes is None or values.codes is None or keys.first != values.first:
        return False
    if keys.codes.kind not in (*kinds, "channel_affine") or values.codes.kind not in kinds:
        return False
    return all(c.bits <= 4 and c.dim in DIMS and c.group % 8 == 0 for c in (keys.codes, values.codes))


def rows(keys: Side, values: Side, queries: int, mask: Mask) -> tuple[int, int]:
    """First row that the tensor cores take and the one after the last; they see no masks, so all are in sight."""
    first, stop = values.first, min(keys.stop, values.stop)
    usable = launch.backend() == "cuda" and not isinstance(mask, mx.array) and queries <= ROWS
    return (first, stop) if usable and stop - first >= LEAST and readable(keys, values) else (first, first)


def shares(count: int, heads: int) -> int:
    """Shares that ``count`` rows of ``heads`` kv heads are split into."""
    return min(-(-count // (128 * WARPS)), max(1, GROUPS // heads))


def parts(
    keys: Side, values: Side, decode: dict[str, int | str], inputs: dict[str, mx.array], count: int
) -> dict[str, mx.array]:
    """What ``combine.h`` needs of these rows; ``decode`` and ``inputs`` are those of ``decode.h``."""
    assert keys.codes is not None and values.codes is not None
    same = keys.codes.table is values.codes.table and keys.codes.bits == values.codes.bits
    copies = 16 if keys.codes.table is not None and values.codes.table is not None and not same else 32
    queries, all_rows = -(-int(decode["ALL_ROWS"]) // 8), int(decode["ALL_ROWS"])
    tile = 64 if keys.codes.kind == "channel_affine" else 32
    query = "qt" if decode["TURNED"] else "q"
    defines = {"K_GROUPS": 1, "V_GROUPS": 1} | decode | {"QUERIES": queries, "TILE": tile, "QUERY": query, "COPIES": copies, "SAME_TABLE": int(same)}
    laced = values.codes.kind == "codebook" and values.codes.bits == 4
    defines |= {"WARPS": WARPS, "STAGES": STAGES, "LACED": int(laced)}
    lead = (count, int(decode["ALL_HEADS"]), all_rows)
    outputs = {
        "fast": ((*lead, int(decode["DV"])), mx.float32),
        "fast_top": (lead, mx.float32),
        "fast_weight": (lead, mx.float32),
    }
    headers = ("readers.h", "pairs.h", "tensor_readers.h")
    grid = (count, int(decode["ALL_HEADS"]), 1)
    shared = max(_tables(keys.codes, values.codes, copies, same) + WARPS * STAGES * _stage(keys, values, tile), all_rows * int(decode["DV"]) * 4)
    made = launch.run(Launch("tensor.h", defines, inputs, outputs, grid, WARPS, shared, headers))
    return dict(zip(outputs, made, strict=True))


def _stage(keys: Side, values: Side, tile: int) -> int:
    """Bytes of the codes of a tile, as ``STAGE_BYTES`` counts them."""
    total = 0
    for side in (keys, values):
        codes = side.codes
        assert codes is not None and codes.scales is not None
        total += tile * codes.dim // 8 * codes.bits
        if codes.kind == "channel_affine":
            total += 8 * codes.dim if 2 * codes.group == tile else 0
        else:
            total += 2 * tile * (1 if codes.kind == "codebook" else 2 * codes.scales.shape[-1])
    return total


def _tables(keys: Readable, values: Readable, copies: int, same: bool) -> int:
    """Bytes of the levels of pairs of codes."""
    count = (keys.kind == "codebook") * 4**keys.bits + (values.kind == "codebook" and not same) * 4**values.bits
    return 4 * copies * count
