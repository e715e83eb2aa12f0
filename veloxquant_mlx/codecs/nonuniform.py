"""Levels fitted to the data: one set per layer and tensor, over channels or tokens normalised to [-1, 1].

The codecs of KVQuant (Hooper et al., NeurIPS 2024, arXiv 2401.18079). Vectors span all heads of a layer: the sparse
part keeps ``ceil(fraction * H * D)`` numbers of every token exact, wherever they are.
"""

from __future__ import annotations

import copy
from math import ceil

import mlx.core as mx

from .base import Axis, Codec, Codes, cast
from .packing import check_bits, lookup, pack, padded, pair_tables, row_multiple
from .sparse import TokenSparse, largest

SAMPLE = 1 << 20  # most numbers that levels are fitted on
LEAST = 2.0**-24  # the smallest float16: widths below it count as this


def fit_levels(u: mx.array, bits: int, sweeps: int) -> mx.array:
    """``2 ** bits`` ascending levels for the numbers of ``u`` (any shape) in [-1, 1], by k-means on the line.

    Starts halfway between the quantiles ``(j + 0.5) / 2 ** bits`` and even spacing: from the quantiles alone, 8 sweeps
    end 22 % above the least error of 4 bits on the keys of two small models, from here less than 1 %. A sweep costs
    one binary search per level in the sorted numbers and their prefix sums. A level without numbers stays where it is.
    Numbers outside [-1, 1] do not count.
    """
    u = mx.sort(u.astype(mx.float32).reshape(-1))
    start, stop = (u < -1).sum(), u.size - (u > 1).sum()
    x = mx.clip(u, -1.0, 1.0)
    sums = mx.concatenate([mx.zeros(1), mx.cumsum(x)])
    count = 1 << bits
    share = (mx.arange(count) + 0.5) / count
    quantiles = x[mx.minimum(start + mx.floor(share * (stop - start)).astype(start.dtype), u.size - 1)]
    levels = (quantiles + 2 * share - 1) / 2
    for _ in range(sweeps):
        cuts = mx.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        edges = mx.concatenate([start[None], mx.clip(cuts, start, stop), stop[None]]).astype(mx.int32)
        n = edges[1:] - edges[:-1]
        levels = mx.where(n > 0, (sums[edges[1:]] - sums[edges[:-1]]) / mx.maximum(n, 1), levels)
    return mx.sort(levels)


class _Nonuniform(Codec):
    """Codes of numbers in [-1, 1] by the nearest of ``2 ** bits`` levels, and a sparse part for what that misses.

    Codes: ``words`` uint32 ``(B, H, n, padded_dim * bits / 32)``, ``sparse_index`` and ``sparse_values``
    ``(B, 1, n, ceil(fraction * H * D))``. ``fitted`` names the arrays of ``fit``, among them ``levels`` float16
    ``(B, 1, 1, 2 ** bits)``.
    """

    fitted: tuple[str, ...] = ("levels",)

    def __init__(self, bits: int, *, dim: int, fraction: float, sweeps: int, fit_rows: int) -> None:
        self.bits, self.dim, self.fraction, self.sweeps = check_bits(bits), dim, fraction, sweeps
        self.padded_dim, self.fit_rows = padded(dim, row_multiple(bits)), fit_rows
        self._sparse = TokenSparse()
        self.layout = {"words": Axis(-2, 1), **(self._sparse.layout if fraction else {})}
        self._fitted: Codes = {}

    def bind(self, fitted: Codes) -> _Nonuniform:
        """This codec with the arrays of ``fit``."""
        bound = copy.copy(self)
        bound._fitted = fitted
        return bound

    def take(self, codes: Codes, index: mx.array) -> Codes | None:
        """None: heads share parameters and entries."""
        return None

    def _count(self, x: mx.array) -> int:
        return ceil(self.fraction * x.shape[1] * x.shape[3] - 1e-9)  # 7 % of 100 are 7, not 8

    def _levels_of(self, u: mx.array) -> mx.array:
        """Levels ``(B, 1, 1, 2 ** bits)`` of every sequence of ``u`` ``(B, H, N, D)``."""
        step = ceil(u[0].size / SAMPLE)
        levels = mx.stack([fit_levels(row[:, ::step], self.bits, self.sweeps) for row in u])
        return levels.astype(mx.float16)[:, None, None]

    def _pack(self, u: mx.array) -> mx.array:
        """Words of the nearest levels of ``u`` ``(B, H, n, D)``: a binary search among the midpoints."""
        levels = self._fitted["levels"][:, 0, 0].astype(mx.float32)
        middles, flat = (levels[:, 1:] + levels[:, :-1]) / 2, u.reshape(u.shape[0], -1)
        codes = mx.zeros(flat.shape, mx.uint8)
        for bit in reversed(range(self.bits)):
            step = 1 << bit
            codes = codes + (flat > mx.take_along_axis(middles, codes + (step - 1), axis=-1)).astype(mx.uint8) * step
        codes = codes.reshape(u.shape)
        return pack(mx.pad(codes, [(0, 0)] * 3 + [(0, self.padded_dim - self.dim)]), self.bits)

    def _unit(self, words: mx.array) -> mx.array:
        """Levels ``(B, H, n, D)`` in float32 of the codes in ``words``."""
        return lookup(words, self.bits, pair_tables(self._fitted["levels"][:, 0, 0]))[..., : self.dim]

    def _dense(self, codes: Codes) -> mx.array:
        """Rows without the sparse part; offsets and widths are fitted or among the codes."""
        every = self._fitted | codes
        return self._unit(codes["words"]) * every["width"].astype(mx.float32) + every["offset"].astype(mx.float32)

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        rows = self._dense(codes)
        return cast(self._sparse.add(rows, codes) if self.fraction else rows, dtype)


class ChannelLevels(_Nonuniform):
    """Keys: the range of every channel is fitted once, over tokens, between the ``fraction / 2`` quantiles.

    Fitted arrays besides the levels: ``offset`` and ``width`` (middle and half-range) float16 ``(B, H, 1, D)``. The
    sparse part of a token takes the numbers that lie farthest outside their channel's range; slots that find none hold
    0, and where there are more than slots the rest stops at the end of the range.
    """

    fitted = ("offset", "width", "levels")

    def fit(self, x: mx.array) -> Codes:
        ordered = mx.sort(x.astype(mx.float32), axis=2)
        low, high = (_quantile(ordered, q) for q in (self.fraction / 2, 1 - self.fraction / 2))
        offset, width = cast((low + high) / 2, mx.float16), cast((high - low) / 2, mx.float16)
        return {"offset": offset, "width": width, "levels": self._levels_of(_normal(x, offset, width))}

    def encode(self, x: mx.array) -> Codes:
        x = x.astype(mx.float32)
        u = _normal(x, self._fitted["offset"], self._fitted["width"])
        codes = {"words": self._pack(u)}
        if not self.fraction:
            return codes
        index = largest(self._sparse.vectors(mx.abs(u)), self._count(x))
        return codes | self._sparse.encode(mx.where(mx.abs(u) > 1, x - self._dense(codes), 0.0), index)


class TokenLevels(_Nonuniform):
    """Values: every token has a range of its own, over all heads, without the numbers farthest from its median.

    Codes besides the words and the sparse part: ``offset`` and ``width`` (middle and half-range) float16
    ``(B, 1, n, 1)``. The median is the upper one where their number is even.
    """

    def __init__(self, bits: int, *, dim: int, fraction: float, sweeps: int, fit_rows: int) -> None:
        super().__init__(bits, dim=dim, fraction=fraction, sweeps=sweeps, fit_rows=fit_rows)
        self.layout = {**self.layout, "offset": Axis(-2, 1), "width": Axis(-2, 1)}

    def _ranges(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Offset and width of the tokens of ``x``, and the indices of the numbers left out."""
        vectors = self._sparse.vectors(x)
        count, size = self._count(x), vectors.shape[-1]
        median = mx.partition(vectors, size // 2, axis=-1)[..., size // 2 : size // 2 + 1]
        index = mx.zeros((*vectors.shape[:-1], 0), mx.uint32)
        if count:
            index = largest(mx.abs(vectors - median), count)
            vectors = mx.put_along_axis(vectors, index, mx.broadcast_to(median, index.shape), axis=-1)
        low, high = vectors.min(-1, keepdims=True), vectors.max(-1, keepdims=True)
        offset = cast((low + high) / 2, mx.float16)
        return offset, cast(mx.maximum(high - offset, offset - low), mx.float16), index

    def fit(self, x: mx.array) -> Codes:
        x = x.astype(mx.float32)
        offset, width, _ = self._ranges(x)
        return {"levels": self._levels_of(_normal(x, offset, width))}

    def encode(self, x: mx.array) -> Codes:
        x = x.astype(mx.float32)
        offset, width, index = self._ranges(x)
        codes = {"words": self._pack(_normal(x, offset, width)), "offset": offset, "width": width}
        return codes | self._sparse.encode(x - self._dense(codes), index) if self.fraction else codes


class Refitted(Codec):
    """``codec`` fitted anew on every block of ``rows`` tokens: what was fitted is part of the block's codes."""

    def __init__(self, codec: ChannelLevels | TokenLevels, rows: int) -> None:
        self.codec, self.block = codec, rows
        self.layout = {name: Axis(axis, slots * rows) for name, (axis, slots) in codec.layout.items()}
        self.layout |= {name: Axis(2, 1) for name in codec.fitted}

    def encode(self, x: mx.array) -> Codes:
        blocks = []
        for start in range(0, x.shape[2], self.block):
            rows = x[:, :, start : start + self.block]
            fitted = self.codec.fit(rows)
            blocks.append(self.codec.bind(fitted).encode(rows) | fitted)
        return {name: mx.concatenate([b[name] for b in blocks], axis=axis) for name, (axis, _) in self.layout.items()}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        blocks = []
        for start in range(0, self.n_tokens(codes), self.block):
            block = self.cut(codes, start, start + self.block)
            blocks.append(self.codec.bind({name: block[name] for name in self.codec.fitted}).decode(block, dtype))
        return mx.concatenate(blocks, axis=2)


def _normal(x: mx.array, offset: mx.array, width: mx.array) -> mx.array:
    """``x`` in units of its range: [-1, 1] from end to end."""
    return (x.astype(mx.float32) - offset.astype(mx.float32)) / mx.maximum(width.astype(mx.float32), LEAST)


def _quantile(ordered: mx.array, q: float) -> mx.array:
    """Quantile ``q`` of rows ``(B, H, N, D)`` in ascending order: ``(B, H, 1, D)``, linear between two rows."""
    at = q * (ordered.shape[2] - 1)
    low = int(at)
    high = min(low + 1, ordered.shape[2] - 1)
    return ordered[:, :, low : low + 1] * (low + 1 - at) + ordered[:, :, high : high + 1] * (at - low)
