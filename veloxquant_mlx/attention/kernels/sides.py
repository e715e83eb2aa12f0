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

    ``turned``: the codes have a basis of their own, queries are turned into it before (1) or by the kernel (2).
    ``sketch`` are the signs of what the codes miss.
    """

    kind: str = "floats"
    bits: int = 0
    dim: int = 0
    row: int = 0
    group: int = 0
    groups: int = 1
    table: tuple[int, ...] = ()
    turned: int = 0
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
    """Keys or values of a store: ``first`` sink rows, packed rows before row ``stop``, the tail.

    ``codes`` describe the packed rows of now, for whoever makes a plan. A side that is ``lasting`` reads what the store
    has by the time of a call, as long as it still ``holds``.
    """

    def __init__(self, stream: StreamStore, codes: Readable | None) -> None:
        self.stream, self.codes = stream, codes
        self._packed = None if codes is None else stream.packed
        self._codec = None if self._packed is None else self._packed.codec
        self._others = [part for part in (stream.prompt, *stream.older) if part is not None]
        # What stands in where there are no rows has the dtype that rows would have.
        usual = stream.dtype if stream.spec.dtype is None else stream.spec.dtype
        self._floats = tuple(usual if rows.data is None else rows.data.dtype for rows in (stream.sinks, stream.tail))
        self._none = [_none(dtype) for dtype in self._floats]
        # Arrays of the packed rows by their names in the codes, constants as they are.
        self._parts: list[str | mx.array] = []
        self.lasting = True
        if codes is None or self._packed is None:
            self.form = Form()
            return
        named = [(name, getattr(codes, name)) for name in ARRAYS[codes.kind]]
        if (sketch := codes.sketch) is not None:
            named += [("words", sketch.words), ("scales", sketch.scales)]
        for field, array in named:
            name = next((name for name, own in self._packed.codes.items() if own is array), None)
            self._parts.append(array if name is None else name)
            # Else made of the codes for this call: rows that come later would be missing.
            self.lasting &= name is not None or field == "table"
        channels = codes.kind == "channel_affine"  # their words and scales run along the rows
        self.form = Form(
            codes.kind,
            codes.bits,
            codes.dim,
            0 if channels else codes.words.shape[-1],
            codes.group,
            codes.scales.shape[-1] if codes.kind == "token_affine" and codes.scales is not None else 1,
            codes.table.shape if codes.kind == "product" and codes.table is not None else (),
            2 if codes.signs is not None else int(codes.on_query is not None),
            codes.sketch.dim if codes.sketch is not None else 0,
        )

    @property
    def first(self) -> int:
        return self.stream.sinks.n

    @property
    def stop(self) -> int:
        return self.stream.sinks.n + (0 if self._packed is None else self._packed.n)

    def holds(self) -> bool:
        """Whether rows are still of these kinds, and nothing stands beside them that kernels cannot read."""
        stream, packed = self.stream, self._packed
        sinks, tail = stream.sinks.data, stream.tail.data
        if packed is None:
            same = stream.packed is None or not stream.packed.n
        else:
            same = packed is stream.packed and packed.n > 0 and packed.codec is self._codec
        return (
            same
            and (sinks is None or sinks.dtype == self._floats[0])
            and (tail is None or tail.dtype == self._floats[1])
            and stream.exact.rows is None
            and stream.added.rows is None
            and not (self._others and any(part.n for part in self._others))
        )

    def arrays(self) -> list[mx.array]:
        """Everything that a kernel reads of this side: sinks, tail, codes."""
        stream, packed = self.stream, self._packed
        sinks, tail = stream.sinks.data, stream.tail.data
        out = [self._none[0] if sinks is None else sinks, self._none[1] if tail is None else tail]
        if packed is not None:
            codes = packed.codes
            out += [codes[part] if isinstance(part, str) else part for part in self._parts]
        return out

    def room(self) -> tuple[int, int, int]:
        """Rows that the buffers have room for: packed, sinks, tail."""
        sinks, tail = self.stream.sinks.data, self.stream.tail.data
        return (
            0 if self._packed is None else self._packed.capacity,
            0 if sinks is None else sinks.shape[2],
            0 if tail is None else tail.shape[2],
        )


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
