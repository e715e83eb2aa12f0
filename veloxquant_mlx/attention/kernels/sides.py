"""Keys and values of a store as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx

from ...codecs.base import Readable

if TYPE_CHECKING:
    from ...cache.store import Store
    from ...cache.stream import StreamStore

KINDS = ("FLOATS", "TOKEN_AFFINE", "CHANNEL_AFFINE", "CODEBOOK", "PRODUCT")


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
