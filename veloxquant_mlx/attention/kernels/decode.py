"""Decode attention over packed rows in kernels: shares of the rows in parallel, then one sum (``decode.h``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import TYPE_CHECKING

import mlx.core as mx

from ...codecs.base import Readable
from . import launch
from .launch import WARPS, Launch

if TYPE_CHECKING:
    from ...cache.store import Store
    from ...cache.stream import StreamStore
    from ..masks import Mask

KINDS = ("FLOATS", "TOKEN_AFFINE", "CHANNEL_AFFINE", "CODEBOOK", "PRODUCT")
MASKS = ("OPEN", "CAUSAL", "BOOLEAN", "ADDITIVE")
ROWS = 8  # query rows whose sums a group of lanes holds
GROUPS = 1056  # groups of lanes that a call is split into: enough for the largest GPUs
SHARE = 256  # rows below which a share is not worth a group
LOG2E = 1 / log(2)


@dataclass(frozen=True)
class Side:
    """Keys or values of a store as a kernel reads them: ``sinks``, then packed rows, then the tail."""

    stream: StreamStore
    codes: Readable | None

    @property
    def first(self) -> int:
        """The first packed row."""
        return self.stream.sinks.n

    @property
    def stop(self) -> int:
        """The first row after those that are packed."""
        return self.first + self.stream.n_sealed

    @property
    def kind(self) -> int:
        return 0 if self.codes is None else KINDS.index(self.codes.kind.upper())

    def inputs(self, side: str) -> dict[str, mx.array]:
        """The arrays of this side, their names after ``side``."""
        out = {
            f"{side}_{name}": _none(self.stream.dtype) if rows.data is None else rows.data
            for name, rows in (("sinks", self.stream.sinks), ("tail", self.stream.tail))
        }
        if (codes := self.codes) is not None:
            arrays = {"words": codes.words, "scales": codes.scales, "biases": codes.biases, "table": codes.table}
            out |= {f"{side}_{name}": a for name, a in arrays.items() if a is not None}
        return out

    def defines(self, side: str) -> dict[str, int | str]:
        """The constants of this side."""
        codes = self.codes
        if codes is None:
            return {}
        out: dict[str, int | str] = {"BITS": codes.bits, "WORDS": codes.words.shape[-1]}
        if codes.group:
            out |= {"GROUP": codes.group}
        if codes.kind == "token_affine":
            assert codes.scales is not None
            out |= {"GROUPS": codes.scales.shape[-1]}
        if codes.kind == "channel_affine":
            del out["WORDS"]  # which grow with the rows
        if codes.kind == "product":
            assert codes.table is not None
            *books, entries, sub = codes.table.shape
            batch, head, place = (
                stride * entries if n > 1 else 0
                for n, stride in zip(books, (books[1] * books[2], books[2], 1), strict=True)
            )
            out["SUB"] = sub
            out["BOOK(h, p)"] = f"(h / HEADS * {batch} + h % HEADS * {head} + (p) * {place})"
        return {f"{side}_{name}": value for name, value in out.items()}

    def counts(self) -> tuple[int, int, int]:
        """Rows that the buffers have room for: packed, sinks, tail."""
        rows = (self.stream.sinks.data, self.stream.tail.data)
        packed = self.stream.packed.capacity if self.stream.packed is not None and self.codes is not None else 0
        return (packed, *(0 if a is None else a.shape[2] for a in rows))


@lru_cache
def _none(dtype: mx.Dtype) -> mx.array:
    out = mx.zeros(8, dtype)
    mx.eval(out)
    return out


@lru_cache
def _constants(numbers: tuple[int, ...] | tuple[float, ...]) -> mx.array:
    out = mx.array(numbers, mx.int32 if isinstance(numbers[0], int) else mx.float32)
    mx.eval(out)
    return out


def sides(store: Store, dim: int) -> tuple[Side, Side] | str:
    """Keys and values of ``store`` for queries of ``dim`` numbers, or why kernels cannot read them."""
    found = []
    for name, stream in (("keys", store.keys), ("values", store.values)):
        codes = stream.readable()
        if isinstance(codes, str):
            return f"no kernel for {name} {codes}"
        found.append(Side(stream, codes))
    keys, values = found
    if dim % 8 or store.values.dim > 256 or dim > 256:
        return f"no kernel for heads of {dim} and {store.values.dim} numbers"
    if values.codes is not None and (values.codes.dim != store.values.dim or values.codes.kind == "channel_affine"):
        return "no kernel for values packed like that"
    return keys, values


def attention(
    keys: Side, values: Side, q: mx.array, scale: float, mask: Mask, sinks: mx.array | None, n: int
) -> mx.array:
    """Attention of ``q`` ``(B, Hq, L, D)`` over the ``n`` rows of a store (``sides``), in q's dtype."""
    b, hq, length, dim = q.shape
    heads, out_dim = keys.stream.heads, values.stream.dim
    rows = hq // heads * length
    held = min(rows, ROWS)
    grid = b * heads, -(-rows // held)
    sizes = values.stop - values.first, n - (values.stop - values.first)
    shares = [_shares(size, grid[0] * grid[1]) for size in sizes]
    strides = (0, 0, 0)
    inputs = {"q": q, "scale": _constants((scale * LOG2E,))}
    kind = 0 if mask is None else 1
    if isinstance(mask, mx.array):
        kind = 2 if mask.dtype == mx.bool_ else 3
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        inputs["mask"], strides = mask, _strides(mask)
    places = (keys.first, keys.stop, values.first, values.stop, values.first, values.first)
    room = [count for pair in zip(keys.counts(), values.counts(), strict=True) for count in pair]
    inputs["counts"] = _constants((n, n - length, *places, *room, *shares, *strides, 0))
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
    inputs = dict(zip(parts, made, strict=True)) | {"counts": inputs["counts"]}
    split = values.codes is not None and values.codes.from_mix is not None
    defines = shape | {"QUERY_HEADS": hq, "SINKS": int(sinks is not None), "FAST": 0, "SPLIT": int(split)}
    if sinks is not None:
        inputs["sinks"] = sinks
    shape_out = (b, hq, length, out_dim)
    if not split:
        outputs = {"out": (shape_out, q.dtype)}
        defines["OUT"] = str(q.dtype).removeprefix("mlx.core.").upper()
        return _combined(defines, inputs, outputs, b * heads * rows)[0]
    wide = {name: ((b, heads, rows, out_dim), mx.float32) for name in ("of_codes", "of_floats")}
    of_codes, of_floats = _combined(defines, inputs, wide, b * heads * rows)
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
