"""Where rows and codes lie: buffers of float rows, the codes of one prompt, codes that grow block by block."""

from __future__ import annotations

import math

import mlx.core as mx

from ..codecs.base import Codec, Codes

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

    def put(self, x: mx.array, slot: mx.array) -> None:
        """Overwrite rows: ``x`` ``(B, H, m, D)`` at ``slot`` ``(B | 1, H | 1, m)``."""
        assert self.data is not None
        index = mx.broadcast_to(slot[..., None], x.shape)
        self.data = mx.put_along_axis(self.data, index, x.astype(self.data.dtype), axis=2)

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


class Block:
    """The codes of one prompt: ``n`` tokens that were encoded together."""

    def __init__(self, codec: Codec):
        self.spec, self.n = codec, 0
        self.codes: Codes = {}
        self.fitted: Codes = {}
        self._bound: Codec | None = None

    @property
    def codec(self) -> Codec:
        """The codec, bound to what was fitted where it needs a fit."""
        if not self.fitted:
            return self.spec
        if self._bound is None:
            self._bound = self.spec.bind(self.fitted)
        return self._bound

    def fit(self, fitted: Codes) -> None:
        """Work with ``fitted`` from now on; an empty dict forgets a fit."""
        self.fitted, self._bound = fitted, None


class Packed(Block):
    """Sealed codes of ``n`` tokens, in buffers that hold ``n`` rounded up to whole growth steps.

    Arrays that the codec's layout does not name have rows along axis 0, as many as they need, in the order of blocks;
    the codec's ``cut`` knows whose they are.
    """

    def __init__(self, codec: Codec):
        super().__init__(codec)
        self.step = math.lcm(GROW, codec.block)

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
        for name in codes.keys() - self.codec.layout.keys():  # rows that only some tokens have
            old = [self.codes[name]] if name in self.codes else []
            self.codes[name] = mx.concatenate([*old, codes[name]], axis=0)
        self.n = n

    def view(self) -> Codes:
        """The codes without spare room."""
        return self.codes if self.n == self.capacity else self.codec.cut(self.codes, 0, self.n)

    def pop_front(self, m: int) -> Codes:
        """Take the codes of the oldest ``m`` tokens out, a multiple of the codec's block."""
        front = self._copy(0, m)
        self.replace(self._copy(m, self.n), self.n - m)
        return front

    def truncate(self, n: int) -> None:
        """Keep the oldest ``n`` tokens, a multiple of the codec's block."""
        self.replace(self._copy(0, n), n)

    def _copy(self, start: int, stop: int) -> Codes:
        # Writing a whole buffer keeps what is written, and a slice would keep its parent.
        return {name: _own(a) for name, a in self.codec.cut(self.codes, start, stop).items()}

    def replace(self, codes: Codes, n: int) -> None:
        """Hold exactly the codes of these ``n`` tokens."""
        self.n, self.codes = 0, {}
        if n:
            self.append(codes, n)
