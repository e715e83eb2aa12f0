"""Decode attention over packed rows in kernels: shares of the rows in parallel, then one sum (``decode.h``)."""

from __future__ import annotations

from functools import lru_cache
from math import log
from typing import TYPE_CHECKING

import mlx.core as mx

from . import launch, tensor
from .launch import WARPS, Launch
from .sides import KINDS, Side

if TYPE_CHECKING:
    from ..masks import Mask

MASKS = ("OPEN", "CAUSAL", "BOOLEAN", "ADDITIVE")
ROWS = 8  # query rows whose sums a group of lanes holds
GROUPS = 1056  # groups of lanes that a call is split into: enough for the largest GPUs
SHARE = 256  # rows below which a share is not worth a group
LOG2E = 1 / log(2)


@lru_cache
def _constants(numbers: tuple[int, ...] | tuple[float, ...]) -> mx.array:
    out = mx.array(numbers, mx.int32 if isinstance(numbers[0], int) else mx.float32)
    mx.eval(out)
    return out


def attention(
    keys: Side, values: Side, q: mx.array, scale: float, mask: Mask, sinks: mx.array | None, n: int
) -> mx.array:
    """Attention of ``q`` ``(B, Hq, L, D)`` over the ``n`` rows of a store (``sides``), in q's dtype."""
    b, hq, length, dim = q.shape
    heads, out_dim = keys.stream.heads, values.stream.dim
    rows = hq // heads * length
    held = min(rows, ROWS)
    grid = b * heads, -(-rows // held)
    low, high = tensor.rows(keys, values, rows, mask)
    packed = values.stop - values.first
    shares = [_shares(size, grid[0] * grid[1]) for size in (packed - (high - low), n - packed)]
    shares[1] += sum(shares) == 0  # there is always one, if of no rows
    fast = tensor.shares(high - low, b * heads)
    strides = (0, 0, 0)
    inputs = {"q": q, "scale": _constants((scale * LOG2E,))}
    kind = 0 if mask is None else 1
    if isinstance(mask, mx.array):
        kind = 2 if mask.dtype == mx.bool_ else 3
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        if mask.shape[1] not in (1, hq):  # one per kv head
            mask = mx.repeat(mask, hq // heads, axis=1)
        inputs["mask"], strides = mask, _strides(mask)
    places = (keys.first, keys.stop, values.first, values.stop, low, high)
    room = [count for pair in zip(keys.counts(), values.counts(), strict=True) for count in pair]
    inputs["counts"] = _constants((n, n - length, *places, *room, *shares, *strides, fast))
    inputs |= keys.inputs("k") | values.inputs("v")
    defines: dict[str, int | str] = {name: i for i, name in enumerate(KINDS)} | {name: i for i, name in enumerate(MASKS)}
    shape = {"ALL_HEADS": b * heads, "ALL_ROWS": rows, "LENGTH": length, "DV": out_dim, "WARPS": WARPS}
    defines |= keys.defines("K") | values.defines("V")
    defines |= {"KEYS": keys.kind, "VALUES": values.kind, "MASK": kind, "HEADS": heads, "ROWS": held, "D": dim}
    defines |= {"TURNED": 0, "DT": dim, "SLOTS": -(-out_dim // 32)} | shape
    if (codes := keys.codes) is not None:
        defines["DT"] = codes.dim
        if codes.on_query is not None:
            inputs["qt"] = codes.on_query(q.reshape(b, heads, rows, dim))
            defines["TURNED"] = 1
    lead = (sum(shares), b * heads, rows)
    parts = {
        "part": ((*lead, out_dim), mx.float32),
        "part_top": (lead, mx.float32),
        "part_weight": (lead, mx.float32),
    }
    made = launch.run(Launch("decode.h", defines, inputs, parts, (sum(shares), *grid)))
    summed = dict(zip(parts, made, strict=True)) | {"counts": inputs["counts"]}
    if fast:
        summed |= tensor.parts(keys, values, defines, inputs, fast)
    split = values.codes is not None and values.codes.from_mix is not None
    defines = shape | {"QUERY_HEADS": hq, "SINKS": int(sinks is not None)}
    defines |= {"FAST": int(fast > 0), "SPLIT": int(split)}
    if sinks is not None:
        summed["sinks"] = sinks
    shape_out = (b, hq, length, out_dim)
    if not split:
        outputs = {"out": (shape_out, q.dtype)}
        defines["OUT"] = str(q.dtype).removeprefix("mlx.core.").upper()
        return _combined(defines, summed, outputs, b * heads * rows)[0]
    wide = {name: ((b, heads, rows, out_dim), mx.float32) for name in ("of_codes", "of_floats")}
    of_codes, of_floats = _combined(defines, summed, wide, b * heads * rows)
    assert values.codes is not None and values.codes.from_mix is not None
    return (values.codes.from_mix(of_codes) + of_floats).astype(q.dtype).reshape(shape_out)


def _combined(
    defines: dict[str, int | str],
    inputs: dict[str, mx.array],
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
    rows: int,
) -> list[mx.array]:
    return launch.run(Launch("combine.h", defines, inputs, outputs, (1, rows, 1)))


def _shares(rows: int, others: int) -> int:
    """Shares that ``rows`` are split into where ``others`` groups run beside each."""
    return min(-(-rows // SHARE), max(1, GROUPS // others))


def _strides(mask: mx.array) -> tuple[int, int, int]:
    """Steps from sequence to sequence, head to head, query row to query row in a mask; 0 where there is only one."""
    _, heads, rows, columns = mask.shape
    steps = (heads * rows * columns, rows * columns, columns)
    return tuple(0 if n == 1 else step for n, step in zip(mask.shape, steps, strict=False))  # type: ignore[return-value]
