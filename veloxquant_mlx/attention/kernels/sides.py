"""Keys and values of a store as kernels read them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from ...codecs.base import Readable

if TYPE_CHECKING:
    from ...cache.store import Store
    from ...cache.stream import StreamStore

KINDS = ("FLOATS", "TOKEN_AFFINE", "CHANNEL_AFFINE", "CODEBOOK", "PRODUCT")
ARRAYS = {
    "floats": (),
    "token_affine": ("words", "scales", "biases"),
    "channel_affine": ("words", "scales", "biases"),
    "codebook": ("words", "scales", "table"),
    "product": ("words", "table"),
}
MOST_DIM = 256  # numbers of a row; the sums of a row must fit in the registers of 32 lanes
WIDEST = 512  # numbers of a query in the basis of the codes: shared memory ends at 32 KB


class Form(NamedTuple):
    """What a kernel is compiled for on one side. ``row`` are the words (bytes) of a row, ``groups`` its scales.

    ``sketch`` are the signs of what the codes miss.
    """

    kind: str = "floats"
    bits: int = 0
    dim: int = 0
    row: int = 0
    group: int = 0
    groups: int = 1
    table: tuple[int, ...] = ()
    turned: bool = False
    sketch: int = 0

    def names(self, side: str) -> tuple[str, ...]:
        """The names of ``Side.arrays``, after ``side``."""
        sketch = ("signs", "sizes") if self.sketch else ()
        return tuple(f"{side}_{name}" for name in ("sinks", "tail", *ARRAYS[self.kind], *sketch))

    def defines(self, side: str) -> dict[str, int | str]:
        """The constants of this side, their names after ``side``."""
        if self.kind == "floats":
            return {}
        out: dict[str, int | str] = {"BITS": self.bits, "WORDS": self.row, "GROUP": self.group, "GROUPS": self.groups}
        if self.kind == "product":
            _, heads, places, entries, out["SUB"] = self.table
            steps = (heads * places, places, 1)
            batch, head, place = (n > 1 and step * entries for n, step in zip(self.table, steps, strict=False))
            out["BOOK(h, p)"] = f"(h / HEADS * {+batch} + h % HEADS * {+head} + (p) * {+place})"
        return {f"{side}_{name}": value for name, value in out.items()}


class Side:
    """Keys or values of a store: ``first`` sink rows, packed rows before row ``stop``, the tail."""

    def __init__(self, stream: StreamStore, codes: Readable | None) -> None:
        self.stream, self.codes, self.first = stream, codes, stream.sinks.n
        self.stop = self.first if codes is None or stream.packed is None else self.first + stream.packed.n
        if codes is None:
            self.form = Form()
            return
        channels = codes.kind == "channel_affine"  # their words and scales run along the rows
        self.form = Form(
            codes.kind,
            codes.bits,
            codes.dim,
            0 if channels else codes.words.shape[-1],
            codes.group,
            codes.scales.shape[-1] if codes.kind == "token_affine" and codes.scales is not None else 1,
            codes.table.shape if codes.kind == "product" and codes.table is not None else (),
            codes.on_query is not None,
            codes.sketch.dim if codes.sketch is not None else 0,
        )

    def arrays(self) -> list[mx.array]:
        """Everything that a kernel reads of this side."""
        stream, codes = self.stream, self.codes
        out = [_none(stream.dtype) if rows.data is None else rows.data for rows in (stream.sinks, stream.tail)]
        if codes is not None:
            out += [getattr(codes, name) for name in ARRAYS[codes.kind]]
            if codes.sketch is not None and codes.sketch.scales is not None:
                out += [codes.sketch.words, codes.sketch.scales]
        return out

    def room(self) -> tuple[int, int, int]:
        """Rows that the buffers have room for: packed, sinks, tail."""
        stream = self.stream
        packed = 0 if self.codes is None or stream.packed is None else stream.packed.capacity
        sinks, tail = (0 if rows.data is None else rows.data.shape[2] for rows in (stream.sinks, stream.tail))
        return packed, sinks, tail


@lru_cache
def _none(dtype: mx.Dtype) -> mx.array:
    out = mx.zeros(8, dtype)
    mx.eval(out)
    return out


def sides(store: Store, dim: int) -> tuple[Side, Side] | str:
    """Keys and values of ``store`` for queries of ``dim`` numbers, or why kernels cannot read them."""
    keys, values = store.keys.readable(), store.values.readable()
    if isinstance(keys, str) or isinstance(values, str):
        return f"no kernel for keys {keys}" if isinstance(keys, str) else f"no kernel for values {values}"
    own = store.values.dim
    if dim % 8 or dim > MOST_DIM or own > MOST_DIM:
        return f"no kernel for heads of {dim} and {own} numbers"
    if keys is not None and keys.dim + (0 if keys.sketch is None else keys.sketch.dim) > WIDEST:
        return f"no kernel for keys of {keys.dim} numbers in their codes"
    if values is not None and (values.dim != own or values.kind == "channel_affine" or values.sketch is not None):
        return f"no kernel for values packed like that ({values.kind}, {values.dim} numbers)"
    return Side(store.keys, keys), Side(store.values, values)
