"""The rows of one layer: growing float buffers, sealed packed blocks, positions. Written once for every method."""

from __future__ import annotations

import math

import mlx.core as mx

from ..codecs.base import Codec, Codes, after
from ..core.types import Recipe, Stream

# Buffers grow by this many rows, so that appending one token is one small write. Held and counted in nbytes.
GROW = 64


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _own(x: mx.array) -> mx.array:
    """A copy in a buffer of its own: a slice that is kept would keep its whole parent alive."""
    return x * 1


class Rows:
    """Rows ``(B, H, n, D)`` in a buffer whose capacity is ``n`` rounded up to ``step``, whatever the history."""

    def __init__(self, step: int = 1):
        self.step, self.n = step, 0
        self.data: mx.array | None = None

    def append(self, x: mx.array) -> None:
        """Add rows at the end."""
        old, n = self.view(), self.n + x.shape[2]
        if self.data is not None and n <= self.data.shape[2]:
            self.data[..., self.n : n, :] = x
        elif self.step == 1 and old is not None:
            self.data = mx.concatenate([old, x], axis=2)
        else:
            self.data = _padded([x] if old is None else [old, x], _round_up(n, self.step) - n)
        self.n = n

    def view(self) -> mx.array | None:
        """The rows held, or None where there are none."""
        if self.data is None or self.n == self.data.shape[2]:
            return self.data
        return self.data[..., : self.n, :]

    def replace(self, x: mx.array | None) -> None:
        """Hold exactly the rows of ``x``."""
        if x is None or x.shape[2] == 0:
            self.data, self.n = None, 0
        else:
            self.n = x.shape[2]
            self.data = _padded([x], _round_up(self.n, self.step) - self.n)

    def pop_front(self, m: int) -> mx.array:
        """Take the oldest ``m`` rows out."""
        rows = self.view()
        assert rows is not None
        front = rows[..., :m, :]
        self.replace(rows[..., m:, :])
        return front

    def truncate(self, n: int) -> None:
        """Keep the oldest ``n`` rows."""
        rows = self.view()
        if rows is not None and n < self.n:
            self.replace(rows[..., :n, :])


def _padded(parts: list[mx.array], extra: int) -> mx.array:
    """The parts, one after another along the row axis, and ``extra`` zero rows: always a buffer of its own."""
    if extra:
        b, h, _, d = parts[-1].shape
        parts = [*parts, mx.zeros((b, h, extra, d), parts[-1].dtype)]
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else _own(parts[0])


class Packed:
    """Sealed codes of ``n`` tokens, in buffers that hold ``n`` rounded up to whole growth steps."""

    def __init__(self, codec: Codec):
        self.codec, self.n = codec, 0
        self.step = math.lcm(GROW, codec.block)
        self.codes: Codes = {}

    @property
    def capacity(self) -> int:
        """Tokens that the buffers have room for. Tokens beyond ``n`` are zeros."""
        return _round_up(self.n, self.step)

    def append(self, codes: Codes, m: int) -> None:
        """Add the codes of ``m`` tokens, a multiple of the codec's block."""
        n, block = self.n + m, self.codec.block
        room = self.capacity
        for name, (axis, slots) in self.codec.layout.items():
            new, at = codes[name], self.n // block * slots
            index = [slice(None)] * new.ndim
            if n > room:
                shape = list(new.shape)
                shape[axis] = (_round_up(n, self.step) - self.n) // block * slots
                grown = mx.zeros(shape, new.dtype)
                if self.n:
                    index[axis] = slice(0, at)
                    grown = mx.concatenate([self.codes[name][tuple(index)], grown], axis=axis)
                self.codes[name] = grown
            index[axis] = slice(at, at + m // block * slots)
            self.codes[name][tuple(index)] = new
        self.n = n

    def view(self) -> Codes:
        """The codes without spare room."""
        return self.codes if self.n == self.capacity else self.codec.cut(self.codes, 0, self.n)

    def truncate(self, n: int) -> None:
        """Keep the oldest ``n`` tokens, a multiple of the codec's block."""
        kept, self.n, self.codes = self.codec.cut(self.codes, 0, n), 0, {}
        if n:
            self.append(kept, n)


class StreamStore:
    """One tensor of one layer: rows ``[sinks | sealed | tail]``."""

    def __init__(self, spec: Stream):
        self.spec = spec
        # A tail that only grows gets room to grow; a bounded one is held to the row.
        self.sinks, self.tail = Rows(), Rows(GROW if spec.codec is None and not spec.bounded else 1)
        self.packed = Packed(spec.codec) if spec.codec is not None else None
        # Of the rows as they came; known from the first append on.
        self.dtype, self.batch, self.heads, self.dim = mx.float32, 0, 0, 0

    @property
    def n_packed(self) -> int:
        return self.packed.n if self.packed is not None else 0

    @property
    def n(self) -> int:
        """Rows held."""
        return self.sinks.n + self.n_packed + self.tail.n

    def seal(self) -> int:
        """Encode every row that has left the window; returns how many rows were encoded."""
        due = self.spec.n_sealed(self.n) - self.n_packed
        if due <= 0 or self.packed is None:
            return 0
        if self.sinks.n < self.spec.sinks:
            self.sinks.append(self.tail.pop_front(self.spec.sinks - self.sinks.n))
        self.packed.append(self.packed.codec.encode(self.tail.pop_front(due)), due)
        return due

    def dense(
        self, start: int = 0, stop: int | None = None, dtype: mx.Dtype | None = None, done: list[mx.array] | None = None
    ) -> mx.array:
        """Rows ``start`` to ``stop`` decoded, ``(B, H, stop - start, D)``; only the blocks touched are decoded.

        With ``done``, decoding waits until those arrays are computed.
        """
        stop = self.n if stop is None else stop
        parts, at = [], 0
        for rows in (self.sinks, None, self.tail):
            n = self.n_packed if rows is None else rows.n
            a, b = max(start - at, 0), min(stop - at, n)
            if a < b:
                part = self._decoded(a, b, dtype, done) if rows is None else _slice(rows, a, b)
                parts.append(part if dtype is None else part.astype(dtype))
            at += n
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def _decoded(self, start: int, stop: int, dtype: mx.Dtype | None, done: list[mx.array] | None = None) -> mx.array:
        assert self.packed is not None
        codec, block = self.packed.codec, self.packed.codec.block
        low, high = start // block * block, min(_round_up(stop, block), self.packed.n)
        rows = codec.decode(after(codec.cut(self.packed.codes, low, high), done or []), dtype or self.dtype)
        return rows[..., start - low : stop - low, :]

    def append(self, x: mx.array) -> None:
        """Add rows at the end of the tail."""
        self.dtype, (self.batch, self.heads, _, self.dim) = x.dtype, x.shape
        self.tail.append(x if self.spec.dtype is None else x.astype(self.spec.dtype))

    def scores(self, q: mx.array) -> mx.array:
        """Scores ``(B, H, R, n)`` of scaled query rows ``(B, H, R, D)``, computed on the packed data."""
        parts = []
        if (sinks := self.sinks.view()) is not None:
            parts.append(q @ sinks.astype(q.dtype).swapaxes(-1, -2))
        if self.packed is not None and self.packed.n:
            # Over the whole buffers, then cut: slicing codes would copy them.
            parts.append(self.packed.codec.scores(q, self.packed.codes)[..., : self.packed.n])
        if (tail := self.tail.view()) is not None:
            parts.append(q @ tail.astype(q.dtype).swapaxes(-1, -2))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def mix(self, p: mx.array) -> mx.array:
        """Weighted sums ``(B, H, R, D)`` of the rows under weights ``(B, H, R, n)``."""
        a, b = self.sinks.n, self.sinks.n + self.n_packed
        parts = []
        if (sinks := self.sinks.view()) is not None:
            parts.append(p[..., :a] @ sinks.astype(p.dtype))
        if self.packed is not None and self.packed.n:
            weights, spare = p[..., a:b], self.packed.capacity - self.packed.n
            if spare:
                weights = mx.pad(weights, [(0, 0)] * 3 + [(0, spare)])
            parts.append(self.packed.codec.mix(weights, self.packed.codes))
        if (tail := self.tail.view()) is not None:
            parts.append(p[..., b:] @ tail.astype(p.dtype))
        out = parts[0]
        for part in parts[1:]:
            out = out + part
        return out

    def truncate(self, n: int) -> None:
        """Keep the oldest ``n`` rows. Rows of a block that is cut come back decoded, into the tail."""
        if n >= self.sinks.n + self.n_packed:
            self.tail.truncate(n - self.sinks.n - self.n_packed)
            return
        self.tail.replace(None)
        if n < self.sinks.n:
            self.sinks.truncate(n)
        if self.packed is not None and self.packed.n:
            keep = max(n - self.sinks.n, 0)
            whole = keep // self.packed.codec.block * self.packed.codec.block
            if whole < keep:
                self.tail.replace(self._decoded(whole, keep, None))
            self.packed.truncate(whole)

    def keep(self, index: mx.array) -> None:
        """Keep the rows that ``index`` ``(B | 1, H | 1, m)`` names, in that order. Only float rows can be dropped."""
        rows = self.tail.view()
        assert rows is not None and self.n == self.tail.n, "rows are dropped before they are sealed"
        self.tail.replace(take_rows(rows, index))

    def cut(self, start: int, stop: int) -> None:
        """Drop rows ``start`` to ``stop``. Only float rows can be dropped."""
        rows = self.tail.view()
        assert rows is not None and self.n == self.tail.n, "rows are dropped before they are sealed"
        self.tail.replace(mx.concatenate([rows[..., :start, :], rows[..., stop:, :]], axis=2))

    def arrays(self) -> dict[str, mx.array]:
        """Every array held, by name."""
        out = {name: rows.data for name, rows in (("sinks", self.sinks), ("tail", self.tail)) if rows.data is not None}
        if self.packed is not None:
            out |= self.packed.codes
        return out


def take_rows(x: mx.array, index: mx.array) -> mx.array:
    """``x`` ``(B, H, n, D)`` at rows ``index`` ``(B | 1, H | 1, m)``, into a buffer of its own."""
    if index.shape[0] == index.shape[1] == 1:
        return mx.take(x, index[0, 0], axis=2)
    b, h, _, d = x.shape
    return mx.take_along_axis(x, mx.broadcast_to(index[..., None], (b, h, index.shape[2], d)), axis=2)


def _slice(rows: Rows, start: int, stop: int) -> mx.array:
    assert rows.data is not None
    return rows.data if stop - start == rows.data.shape[2] else rows.data[..., start:stop, :]


class Store:
    """Keys, values and positions of one layer, and the auxiliary arrays of its policy."""

    def __init__(self, recipe: Recipe):
        self.keys, self.values = StreamStore(recipe.keys), StreamStore(recipe.values)
        # None while row i is the token at position i.
        self.positions: mx.array | None = None
        self.aux: dict[str, mx.array] = {}

    @property
    def n(self) -> int:
        """Rows held."""
        return self.keys.n

    def append(self, keys: mx.array, values: mx.array, start: int) -> None:
        """Add the rows of the tokens from position ``start`` on."""
        self.keys.append(keys)
        self.values.append(values)
        if self.positions is not None:
            new = mx.arange(start, start + keys.shape[2], dtype=mx.int32)
            new = mx.broadcast_to(new, (*self.positions.shape[:2], keys.shape[2]))
            self.positions = mx.concatenate([self.positions, new], axis=-1)

    def seal(self) -> int:
        """Encode what has left the windows; returns the number of rows encoded, keys and values together."""
        return self.keys.seal() + self.values.seal()

    def keep(self, index: mx.array) -> None:
        """Keep the rows that ``index`` ``(B | 1, H | 1, m)`` names, in that order."""
        if self.positions is None:
            self.positions = index.astype(mx.int32)
        else:
            shape = (*mx.broadcast_shapes(self.positions.shape[:2], index.shape[:2]), index.shape[2])
            old = mx.broadcast_to(self.positions, (*shape[:2], self.positions.shape[2]))
            self.positions = mx.take_along_axis(old, mx.broadcast_to(index, shape), axis=-1)
        self.keys.keep(index)
        self.values.keep(index)

    def cut(self, start: int, stop: int) -> None:
        """Drop rows ``start`` to ``stop`` of every head."""
        old = mx.arange(self.n, dtype=mx.int32)[None, None] if self.positions is None else self.positions
        self.positions = mx.concatenate([old[..., :start], old[..., stop:]], axis=-1)
        self.keys.cut(start, stop)
        self.values.cut(start, stop)

    def truncate(self, n: int) -> None:
        """Keep the oldest ``n`` rows."""
        self.keys.truncate(n)
        self.values.truncate(n)

    def arrays(self) -> dict[str, mx.array]:
        """Every array that the store keeps alive, by name."""
        out = {f"k.{name}": a for name, a in self.keys.arrays().items()}
        out |= {f"v.{name}": a for name, a in self.values.arrays().items()}
        if self.positions is not None:
            out["positions"] = self.positions
        return out | {f"aux.{name}": a for name, a in self.aux.items()}

    def set_arrays(self, arrays: dict[str, mx.array]) -> None:
        """Put back arrays that ``arrays()`` gave; counts are restored by ``set_counts``."""
        for name, array in arrays.items():
            owner, _, field = name.partition(".")
            if owner == "positions":
                self.positions = array
            elif owner == "aux":
                self.aux[field] = array
            else:
                stream = self.keys if owner == "k" else self.values
                if field in ("sinks", "tail"):
                    getattr(stream, field).data = array
                else:
                    assert stream.packed is not None
                    stream.packed.codes[field] = array

    def copy_from(self, other: Store) -> None:
        """Become an independent copy: the arrays are shared until one side writes."""
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            mine.dtype, mine.batch, mine.heads, mine.dim = theirs.dtype, theirs.batch, theirs.heads, theirs.dim
        self.set_arrays({name: mx.array(a) for name, a in other.arrays().items()})
        self.set_counts(other.counts())

    def counts(self) -> list[int]:
        """Rows per segment: what the arrays' shapes alone do not tell."""
        return [n for s in (self.keys, self.values) for n in (s.sinks.n, s.n_packed, s.tail.n)]

    def set_counts(self, counts: list[int]) -> None:
        """Restore what ``counts()`` gave."""
        for stream, (sinks, packed, tail) in ((self.keys, counts[:3]), (self.values, counts[3:])):
            stream.sinks.n, stream.tail.n = sinks, tail
            if stream.packed is not None:
                stream.packed.n = packed
