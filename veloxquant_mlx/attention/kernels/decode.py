"""Decode attention over packed rows in kernels: shares of the rows in parallel, then one sum (``decode.h``)."""

from __future__ import annotations

from functools import lru_cache
from math import log
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from . import launch, tensor
from .launch import Program
from .sides import KINDS, Form, Side

if TYPE_CHECKING:
    from ..masks import Mask

MASKS = ("OPEN", "CAUSAL", "BOOLEAN", "ADDITIVE")
WARPS = 4  # groups of 32 lanes that work together
ROWS = 8  # query rows whose sums a group of lanes holds
GROUPS = 1056  # groups of lanes that a call is split into: enough for the largest GPUs
SHARE = 256  # rows below which a share is not worth a group
LOG2E = 1 / log(2)


class Call(NamedTuple):
    """What programs are made for: ``rows`` query rows of ``length`` tokens for each of ``groups`` kv heads."""

    keys: Form
    values: Form
    groups: int
    heads: int
    rows: int
    length: int
    dim: int
    value_dim: int
    mask: int
    sinks: bool
    dtype: mx.Dtype
    tensor: bool
    same_table: bool


@lru_cache(maxsize=512)
def _programs(call: Call) -> tuple[Program, Program]:
    """The program that takes the shares, and the one that sums them."""
    held = min(call.rows, ROWS)
    shape = {"ALL_HEADS": call.groups, "ALL_ROWS": call.rows, "LENGTH": call.length, "DV": call.value_dim}
    defines: dict[str, int | str] = {name: i for i, name in enumerate(KINDS)}
    defines |= {name: i for i, name in enumerate(MASKS)} | shape | {"WARPS": WARPS}
    defines |= call.keys.defines("K") | call.values.defines("V")
    defines |= {"KEYS": KINDS.index(call.keys.kind.upper()), "VALUES": KINDS.index(call.values.kind.upper())}
    defines |= {"MASK": call.mask, "HEADS": call.heads, "ROWS": held, "D": call.dim}
    defines |= {"DT": call.keys.dim or call.dim, "TURNED": int(call.keys.turned), "SLOTS": -(-call.value_dim // 32)}
    defines["SKETCH"] = call.keys.sketch
    # in the order of ``attention``
    inputs = ["counts", "scale", "q", *(["mask"] if call.mask > 1 else [])]
    inputs += [name for name, used in (("qt", call.keys.turned), ("qs", call.keys.sketch)) if used]
    names = (*inputs, *call.keys.names("k"), *call.values.names("v"))
    outputs = ("part", "part_top", "part_weight")
    if call.tensor:
        extra = tensor.defines(call.keys, call.values, call.rows, call.same_table)
        shared = tensor.shared_bytes(call.keys, call.values, extra, call.rows * call.value_dim, WARPS)
        body = f"if (GROUP_X < counts[16]) {{\nif (GROUP_Z > 0) return;\n{launch.text('tensor.h')}}} else {{\n"
        body += f"{launch.text('decode.h')}}}\n"
        shares = Program("tensor", body, defines | extra, names, outputs, WARPS, tensor.HEADERS, shared)
    else:
        shares = Program("decode", launch.text("decode.h"), defines, names, outputs, WARPS)
    ends: dict[str, int | str] = {
        **shape,
        "WARPS": 8,
        "QUERY_HEADS": call.heads * call.rows // call.length,
        "SINKS": int(call.sinks),
    }
    ends |= {"SPLIT": int(call.values.turned)}
    ends["OUT"] = str(call.dtype).removeprefix("mlx.core.").upper()
    summed = (*outputs, "counts", *(("sinks",) if call.sinks else ()))
    results = ("of_codes", "of_floats") if call.values.turned else ("out",)
    return shares, Program("combine", launch.text("combine.h"), ends, summed, results, 8)


@lru_cache
def _constants(numbers: tuple[int, ...] | tuple[float, ...]) -> mx.array:
    out = mx.array(numbers, mx.int32 if isinstance(numbers[0], int) else mx.float32)
    mx.eval(out)
    return out


def attention(
    keys: Side,
    values: Side,
    q: mx.array,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    n: int,
    half: bool = True,
) -> mx.array:
    """Attention of ``q`` ``(B, Hq, L, D)`` over the ``n`` rows of a store (``sides``), in q's dtype.

    With ``half`` the products may be made by tensor cores, in half precision.
    """
    b, hq, length, dim = q.shape
    heads, value_dim = keys.stream.heads, values.stream.dim
    groups, rows, kind, steps = b * heads, hq // heads * length, 0 if mask is None else 1, (0, 0, 0)
    # tensor cores see no masks: the rows that they take are in sight of all queries
    packed, low, high = values.stop - values.first, values.first, min(keys.stop, values.stop, n - length + 1)
    fast = (
        half
        and high - low >= tensor.LEAST
        and keys.first == low
        and rows <= tensor.ROWS
        and not isinstance(mask, mx.array)
        and tensor.readable(keys.form, values.form)
        and launch.backend() == "cuda"
    )
    high = high if fast else low
    inputs = [_constants((scale * LOG2E,)), q]
    if isinstance(mask, mx.array):
        kind = 2 if mask.dtype == mx.bool_ else 3
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        if mask.shape[1] not in (1, hq):  # one per kv head
            mask = mx.repeat(mask, hq // heads, axis=1)
        steps = _strides(mask)
        inputs.append(mask)
    if keys.codes is not None and keys.codes.on_query is not None:
        inputs.append(keys.codes.on_query(q.reshape(b, heads, rows, dim)))
    if keys.codes is not None and (sketch := keys.codes.sketch) is not None and sketch.on_query is not None:
        inputs.append(sketch.on_query(q.reshape(b, heads, rows, dim)))
    same = keys.codes is not None and values.codes is not None and keys.codes.table is values.codes.table
    size = (groups, heads, rows, length, dim, value_dim)
    main, ends = _programs(Call(keys.form, values.form, *size, kind, sinks is not None, q.dtype, fast, same))
    others = -(-rows // ROWS) if rows > ROWS else 1
    split = tensor.shares(high - low, groups, WARPS) if fast else 0
    coded, plain = _shares(packed - (high - low), groups * others), _shares(n - packed, groups * others)
    plain += not (split or coded or plain)  # there is always one, if of no rows
    spans = (n, n - length, keys.first, keys.stop, values.first, values.stop, low, high)
    room = [count for pair in zip(keys.room(), values.room(), strict=True) for count in pair]
    counts = _constants((*spans, *room, coded, plain, split, *steps))
    total = split + coded + plain
    lead = (total, groups, rows)
    outputs = [((*lead, value_dim), mx.float32), (lead, mx.float32), (lead, mx.float32)]
    parts = launch.run(main, [counts, *inputs, *keys.arrays(), *values.arrays()], outputs, (total, groups, others))
    summed = [*parts, counts] if sinks is None else [*parts, counts, sinks]
    shape, grid = (b, hq, length, value_dim), (1, groups * rows, 1)
    if values.codes is None or values.codes.from_mix is None:
        return launch.run(ends, summed, [(shape, q.dtype)], grid)[0]
    of_codes, of_floats = launch.run(ends, summed, [((b, heads, rows, value_dim), mx.float32)] * 2, grid)
    return (values.codes.from_mix(of_codes) + of_floats).astype(q.dtype).reshape(shape)


def _shares(rows: int, others: int) -> int:
    """Shares that ``rows`` are split into where ``others`` groups run beside each."""
    return min(-(-rows // SHARE), max(1, GROUPS // others))


def _strides(mask: mx.array) -> tuple[int, ...]:
    """Steps from sequence to sequence, head to head, query row to query row in a mask; 0 where there is only one."""
    _, heads, rows, columns = mask.shape
    steps = (heads * rows * columns, rows * columns, columns)
    return tuple(0 if n == 1 else step for n, step in zip(mask.shape, steps, strict=False))
