"""A few numbers of every vector kept exact: what a dense codec misses there, added to its rows.

The sparse part of GEAR (Kang et al., arXiv 2403.05527) and of KVQuant (Hooper et al., NeurIPS 2024, arXiv 2401.18079).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import mlx.core as mx

from .base import F16_MAX, Axis, Codes


def largest(x: mx.array, count: int) -> mx.array:
    """Indices ``(..., count)`` of the largest numbers along the last axis, every one once."""
    return mx.argpartition(-x, count - 1, axis=-1)[..., :count]


def extremes(x: mx.array, count: int) -> mx.array:
    """Indices ``(..., count)`` of the ``count / 2`` largest and as many smallest numbers, every one once."""
    high = largest(x, count // 2)
    rest = mx.put_along_axis(x, high, mx.array(-mx.inf, x.dtype), axis=-1)
    return mx.concatenate([high, largest(mx.where(mx.isinf(rest), rest, -rest), count // 2)], axis=-1)


class Sparse(ABC):
    """Entries ``m`` per vector of rows ``(B, H, n, D)``; ``vectors`` lays vectors along the last axis.

    Codes: ``sparse_index`` uint16 (uint32 for vectors longer than 65536) and ``sparse_values`` float16, both
    ``(..., m)``. An entry is the difference to the dense rows, so that it is added, never written over them; a slot
    without use holds the value 0. Products visit the entries only, in float32.
    """

    layout: Mapping[str, Axis]

    @abstractmethod
    def vectors(self, x: mx.array) -> mx.array:
        """Rows ``(B, H, n, D)`` with their vectors along the last axis."""

    @abstractmethod
    def rows(self, vectors: mx.array, like: mx.array) -> mx.array:
        """The inverse of ``vectors``, in the shape of ``like``."""

    @abstractmethod
    def part(self, codes: Codes, start: int, stop: int) -> Codes:
        """The codes of tokens ``start`` to ``stop``, which must lie in one block."""

    @abstractmethod
    def _places(self, index: mx.array, shape: tuple[int, int, int, int]) -> tuple[mx.array, mx.array]:
        """Of every entry, flat: its token in ``B * H * n`` and its channel in ``B * H * D``; ``shape`` is the rows'."""

    def encode(self, difference: mx.array, index: mx.array) -> Codes:
        """Codes of the entries ``index`` ``(..., m)`` of the vectors of ``difference`` ``(B, H, n, D)``."""
        vectors = self.vectors(difference)
        values = mx.clip(mx.take_along_axis(vectors, index, axis=-1), -F16_MAX, F16_MAX).astype(mx.float16)
        dtype = mx.uint16 if vectors.shape[-1] <= 1 << 16 else mx.uint32
        return {"sparse_index": index.astype(dtype), "sparse_values": values}

    def add(self, rows: mx.array, codes: Codes) -> mx.array:
        """``rows`` ``(B, H, n, D)`` with the entries added."""
        b, h, n, dim = rows.shape
        tokens, channels = self._places(codes["sparse_index"], (b, h, n, dim))
        values = codes["sparse_values"].reshape(-1).astype(rows.dtype)
        return rows.reshape(-1).at[tokens * dim + channels % dim].add(values).reshape(rows.shape)

    def scores(self, q: mx.array, codes: Codes, n: int) -> mx.array:
        """What the entries of ``n`` tokens add to the scores: ``(B, H, R, n)`` float32 for ``q`` ``(B, H, R, D)``."""
        b, h, _, dim = q.shape
        tokens, channels = self._places(codes["sparse_index"], (b, h, n, dim))
        return _scatter(q, channels, tokens, codes["sparse_values"], n)

    def mix(self, p: mx.array, codes: Codes, dim: int) -> mx.array:
        """What the entries add to the sums under ``p`` ``(B, H, R, n)``: float32 ``(B, H, R, D)``."""
        b, h, _, n = p.shape
        tokens, channels = self._places(codes["sparse_index"], (b, h, n, dim))
        return _scatter(p, tokens, channels, codes["sparse_values"], dim)


def _scatter(x: mx.array, source: mx.array, target: mx.array, values: mx.array, width: int) -> mx.array:
    """``out[target] += values * x[source]`` over all entries, for every of the R rows of ``x`` ``(B, H, R, m)``."""
    b, h, r, _ = x.shape
    entries = x.astype(mx.float32).swapaxes(-1, -2).reshape(-1, r)[source]
    entries = entries * values.astype(mx.float32).reshape(-1, 1)
    out = mx.zeros((b * h * width, r)).at[target].add(entries)
    return out.reshape(b, h, width, r).swapaxes(-1, -2)


class TokenSparse(Sparse):
    """A vector is one token over all heads: codes ``(B, 1, n, m)``, index ``head * D + channel``.

    Heads share the codes: a codec that holds them cannot pick tokens per head (``Codec.take`` is None).
    """

    layout = MappingProxyType({"sparse_index": Axis(-2, 1), "sparse_values": Axis(-2, 1)})

    def vectors(self, x: mx.array) -> mx.array:
        b, h, n, dim = x.shape
        return x.swapaxes(1, 2).reshape(b, 1, n, h * dim)

    def rows(self, vectors: mx.array, like: mx.array) -> mx.array:
        b, h, n, dim = like.shape
        return vectors.reshape(b, n, h, dim).swapaxes(1, 2)

    def part(self, codes: Codes, start: int, stop: int) -> Codes:
        return {name: codes[name][:, :, start:stop] for name in self.layout}

    def _places(self, index: mx.array, shape: tuple[int, int, int, int]) -> tuple[mx.array, mx.array]:
        b, h, n, dim = shape
        batch = mx.arange(b, dtype=mx.uint32).reshape(b, 1, 1, 1) * h
        token, index = mx.arange(n, dtype=mx.uint32).reshape(1, 1, n, 1), index.astype(mx.uint32)
        return ((batch + index // dim) * n + token).reshape(-1), (batch * dim + index).reshape(-1)


class ChannelSparse(Sparse):
    """A vector is one channel of one head over a block of tokens: codes ``(B, H, n / block, D, m)``.

    The index counts from the start of the block; ``block=None`` takes all tokens as one.
    """

    layout = MappingProxyType({"sparse_index": Axis(2, 1), "sparse_values": Axis(2, 1)})

    def __init__(self, block: int | None = None) -> None:
        self.block = block

    def vectors(self, x: mx.array) -> mx.array:
        b, h, n, dim = x.shape
        block = self.block or n
        return x.reshape(b, h, n // block, block, dim).swapaxes(-1, -2)

    def rows(self, vectors: mx.array, like: mx.array) -> mx.array:
        return vectors.swapaxes(-1, -2).reshape(like.shape)

    def part(self, codes: Codes, start: int, stop: int) -> Codes:
        # entries of other tokens become slots without use
        index = codes["sparse_index"]
        inside = (index >= start) & (index < stop)
        return {
            "sparse_index": mx.where(inside, index - start, 0).astype(index.dtype),
            "sparse_values": mx.where(inside, codes["sparse_values"], 0).astype(mx.float16),
        }

    def _places(self, index: mx.array, shape: tuple[int, int, int, int]) -> tuple[mx.array, mx.array]:
        b, h, n, dim = shape
        heads = mx.arange(b * h, dtype=mx.uint32).reshape(b, h, 1, 1, 1)
        block = mx.arange(index.shape[2], dtype=mx.uint32).reshape(-1, 1, 1) * (self.block or n)
        channels = mx.broadcast_to(heads * dim + mx.arange(dim, dtype=mx.uint32).reshape(-1, 1), index.shape)
        return (heads * n + block + index.astype(mx.uint32)).reshape(-1), channels.reshape(-1)
