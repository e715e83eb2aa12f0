"""Several sequences of different lengths under one model call: a ragged list of single-sequence caches.

Rows of different lengths have different windows, blocks, budgets and kept sets, so they are stored and attended one
by one. Padding is never stored, attended or counted, nothing is moved when rows join or leave, and a row's numbers do
not depend on its neighbours. The price is one small attention per row; see the benchmarks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from ..attention.hook import KVHandle
from ..core.exceptions import CacheInputError, CacheStateError
from .layer import CompressedKVCache, Mode


class _Share(NamedTuple):
    """Which of the padded call's tokens belong to one row: ``n`` from ``skip`` on, after ``before`` columns."""

    skip: int
    n: int
    before: int


class CompressedBatchCache:
    """What ``merge`` of compressed caches returns: mlx_lm's batch protocol over one cache per sequence."""

    def __init__(self, rows: Sequence[CompressedKVCache], left_padding: Sequence[int] | None = None):
        self.rows: list[CompressedKVCache] = list(rows)
        self.shared = any(row.shared for row in rows)
        modes = {row.mode for row in rows if not row.empty()}
        self.mode = next((m for m in (Mode.ARRAY, Mode.HANDLE) if m in modes), Mode.LEARN)
        self._issued: tuple[mx.array, mx.array] | None = None
        self._skip = list(left_padding or [0] * len(self.rows))  # padding still to come before each row
        self._remaining: list[int] | None = None  # tokens still to come per row, None outside right-padded prompts
        self._plan: list[_Share] = []
        self._past, self._length = 0, 0  # columns before the present call, tokens in it
        self._shape = (len(self.rows), 0, 0)  # B, H and columns of the present call
        self._dims, self._dtypes = (0, 0), (mx.float32, mx.float32)  # of its keys and values
        self._offsets: tuple[list[int], mx.array] | None = None

    # ------------------------------------------------------------------------------------------- protocol of mlx_lm

    @property
    def offset(self) -> mx.array:
        """Position of the next token per row, ``(B,)`` int32; negative while padding is to come."""
        now = [row.offset - skip for row, skip in zip(self.rows, self._skip, strict=True)]
        if self._offsets is None or self._offsets[0] != now:
            self._offsets = now, mx.array(now)
        return self._offsets[1]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Give every row its own tokens of ``keys`` and ``values`` ``(B, H, S, D)``."""
        if keys.shape[0] != len(self.rows):
            raise CacheInputError(f"keys have {keys.shape[0]} rows; this batch has {len(self.rows)} sequences")
        if self.mode is Mode.LEARN and self._issued is not None:
            for row in self.rows:
                row.use_arrays()
            self.mode = Mode.ARRAY
        widths, length, plan = self._widths(), keys.shape[2], []
        for i, (row, part) in enumerate(zip(self.rows, self.shares(length), strict=True)):
            n = part.stop - part.start
            if self._remaining is not None:
                self._remaining[i] -= n
            self._skip[i] -= part.start
            plan.append(_Share(part.start, n, widths[i]))
            if n:
                row.append(keys[i : i + 1, :, part], values[i : i + 1, :, part])
        self._plan, self._past, self._length = plan, max(widths), length
        self._shape = (len(self.rows), keys.shape[1], self._past + length)
        self._dims, self._dtypes = (keys.shape[3], values.shape[3]), (keys.dtype, values.dtype)
        return self._issue((keys, values) if self._past == 0 else None)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last update returned, for layers that share another layer's keys and values."""
        self.shared = True
        return self._issue(None) if self.mode is Mode.HANDLE or self._issued is None else self._issued

    def attend(
        self, queries: mx.array, *, scale: float, mask: mx.array | str | None = None, sinks: mx.array | None = None
    ) -> mx.array:
        """Attention ``(B, Hq, L, Dv)``, row by row; outputs of padding are zeros. CacheStateError without an update."""
        if not self._plan:
            raise CacheStateError("attend without an update of these rows; call update_and_fetch first")
        self.mode, self._issued = Mode.HANDLE, None
        outs: list[mx.array | None] = []
        for i, (row, share) in enumerate(zip(self.rows, self._plan, strict=True)):
            if share.n == 0:
                outs.append(None)
                continue
            row.shared = self.shared
            part = queries[i : i + 1, :, share.skip : share.skip + share.n]
            out = row.attend(part, scale=scale, mask=self._row_mask(mask, i, share), sinks=sinks)
            after = self._length - share.skip - share.n
            outs.append(mx.pad(out, [(0, 0), (0, 0), (share.skip, after), (0, 0)]) if share.skip or after else out)
        blank = mx.zeros((1, *queries.shape[1:3], self._dims[1]), queries.dtype)
        return mx.concatenate([blank if out is None else out for out in outs])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask for ``N`` tokens: a shorthand where rows attend by themselves, else ``(B, 1, N, columns)``."""
        if self.mode is Mode.HANDLE and window_size is None and not return_array:
            return None if N == 1 else "causal"
        widths = self._widths()
        past = max(widths)
        left = [past - width + skip for width, skip in zip(widths, self._skip, strict=True)]
        return create_causal_mask(N, past, window_size=window_size, left_padding=mx.array(left))

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce padding: ``left_padding`` columns before, or ``lengths`` real tokens per row of a padded prompt."""
        if left_padding is not None:
            self._skip = [a + int(b) for a, b in zip(self._skip, left_padding, strict=True)]
        if lengths is not None:
            self._remaining = [int(n) for n in lengths]
        elif right_padding is not None and any(right_padding):
            raise CacheInputError("right_padding needs lengths, the number of real tokens per row")

    def finalize(self) -> None:
        """The padded prompt is over."""
        self._remaining = None

    def filter(self, keep: Any) -> None:
        """Keep the rows of these indices, in this order."""
        indices = [int(i) for i in keep]
        self.rows = [self.rows[i] for i in indices]
        self._skip = [self._skip[i] for i in indices]
        if self._remaining is not None:
            self._remaining = [self._remaining[i] for i in indices]
        self._issued, self._plan = None, []

    def extend(self, other: CompressedBatchCache) -> None:
        """Take in the rows of ``other``, which is given up."""
        if self._remaining is not None or other._remaining is not None:
            raise CacheStateError("batches are joined between prompts: call finalize first")
        for row in self.rows:
            row.settle()
        joined = CompressedBatchCache([*self.rows, *other.rows], [*self._skip, *other._skip])
        self.__dict__.update(joined.__dict__)

    def extract(self, i: int) -> CompressedKVCache:
        """A copy of one sequence as a cache of its own."""
        return copy.deepcopy(self.rows[i])

    @classmethod
    def merge(cls, caches: Sequence[CompressedKVCache | CompressedBatchCache]) -> CompressedBatchCache:
        """One batch of copies of all sequences in ``caches``."""
        rows: list[CompressedKVCache] = []
        for cache in caches:
            rows += cache.rows if isinstance(cache, CompressedBatchCache) else [cache]
        for row in rows:
            if len(rows) > 1 and not row.layer.batches:
                raise CacheStateError(
                    "merge: this model's attention cannot take a mask per sequence. Run its sequences one by one."
                )
            if row.batch_size > 1:
                raise CacheStateError(
                    f"merge takes caches of one sequence; this one holds {row.batch_size}. Use one cache per sequence."
                )
        return cls([copy.deepcopy(row) for row in rows])

    def is_trimmable(self) -> bool:
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` tokens of every row; returns the least that was possible."""
        self._plan = []
        return min((row.trim(n) for row in self.rows), default=0)

    def size(self) -> int:
        return max((row.offset for row in self.rows), default=0)

    def empty(self) -> bool:
        return all(row.empty() for row in self.rows)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def state(self) -> list[tuple[mx.array, ...]]:
        return [row.state for row in self.rows]

    @property
    def keys(self) -> list[mx.array] | None:
        """Every stored array, for models that hang dependencies on it."""
        return [array for row in self.rows for array in row.keys or []] or None

    @keys.setter
    def keys(self, arrays: list[mx.array]) -> None:
        at = 0
        for row in self.rows:
            n = len(row.keys or [])
            if n:
                row.keys = arrays[at : at + n]
            at += n

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedBatchCache:
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        clone.rows, clone._skip = [copy.deepcopy(row) for row in self.rows], list(self._skip)
        clone._remaining = None if self._remaining is None else list(self._remaining)
        clone._issued = None
        return clone

    # ------------------------------------------------------------------------------------------------- our own names

    def shares(self, length: int) -> list[slice]:
        """Which tokens of the next call, of ``length`` tokens, are those of each row: the others are padding."""
        parts = []
        for i, skip in enumerate(self._skip):
            start = min(skip, length)
            n = length - start if self._remaining is None else min(length - start, self._remaining[i])
            parts.append(slice(start, start + n))
        return parts

    @property
    def plan(self) -> list[slice]:
        """The same of the latest call."""
        return [slice(share.skip, share.skip + share.n) for share in self._plan]

    # -------------------------------------------------------------------------------------------------------- inside

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Decoded ``(B, H, columns, D)``: older rows end at one common column, the new tokens follow."""
        keys, values = [], []
        for row, share in zip(self.rows, self._plan, strict=True):
            held = (None, None) if row.empty() else row.materialize()
            for out, rows, dim, dtype in zip((keys, values), held, self._dims, self._dtypes, strict=True):
                out.append(self._aligned(rows, share, dim, dtype))
        return mx.concatenate(keys), mx.concatenate(values)

    def _aligned(self, rows: mx.array | None, share: _Share, dim: int, dtype: mx.Dtype) -> mx.array:
        def blank(n: int) -> mx.array:
            return mx.zeros((1, self._shape[1], n, dim), dtype)

        if rows is None:
            return blank(self._shape[2])
        old, new = rows[..., : share.before, :], rows[..., share.before :, :]
        tail = self._length - share.skip - share.n
        return mx.concatenate([blank(self._past - share.before), old, blank(share.skip), new, blank(tail)], axis=2)

    def _widths(self) -> list[int]:
        """Columns per row before the next call: tokens seen, or rows held where the model attends on arrays."""
        if self.mode is Mode.HANDLE:
            return [row.offset for row in self.rows]
        for row in self.rows:
            row.settle()
            if self.mode is Mode.LEARN:
                row.store.compact()  # attention may still come back: it must find the rows that the mask counts
        return [row.positions.shape[-1] for row in self.rows]

    def _row_mask(self, mask: mx.array | str | None, i: int, share: _Share) -> mx.array | str | None:
        """The part of an array mask that speaks of row ``i``: its own tokens and its own columns."""
        if not isinstance(mask, mx.array):
            return mask
        if mask.ndim == 4 and mask.shape[0] > 1:
            mask = mask[i : i + 1]
        new = slice(share.skip, share.skip + share.n)
        if mask.shape[-2] > 1:
            mask = mask[..., new, :]
        old, own = mask[..., self._past - share.before : self._past], mask[..., self._past :][..., new]
        return mx.concatenate([old, own], axis=-1)

    def _issue(self, arrays: tuple[mx.array, mx.array] | None) -> tuple[Any, Any]:
        self._issued = None
        if self.mode is Mode.HANDLE:
            shapes = [(*self._shape, dim) for dim in self._dims]
            return (
                KVHandle(self, "k", shapes[0], self._dtypes[0]),
                KVHandle(self, "v", shapes[1], self._dtypes[1]),
            )
        issued = arrays or self.materialize()
        if self.mode is Mode.LEARN:
            self._issued = issued
        return issued
