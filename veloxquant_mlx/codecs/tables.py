"""Dot products of queries with packed rows of a scalar codebook."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from .base import TILE, after
from .packing import lookup, lookup_table, unpack_wide

# Query rows per kv head up to which tables are used. Decoding a tile once for all rows costs less beyond.
MOST_ROWS = 8


class PackedDots:
    """``<q, levels[codes]>`` for rows of ``bits``-bit codes, in one of two ways.

    Tiles: levels are looked up for ``TILE`` rows at a time and multiplied. Tables (``fused``, up to ``MOST_ROWS`` query
    rows): what every value of a group of codes adds to the score is looked up in a table made of the query; no row is
    decoded. The codes in a byte are a group (two of 3 bits, one of 5 bits and more). ``fused=None``: on the CPU.

    Measured on the CPU (MLX 0.32.4, 8 heads of 128, 4096 rows, one and four query rows per head), tables are at 1 bit
    4.8 and 1.7 times as fast as tiles, at 2 bits 3.4 and 1.6 times, at 4 bits 1.1 and 0.4 times. Tables cost
    ``D * 256`` products per query row and pay from some hundred stored rows on.
    """

    def __init__(self, levels: np.ndarray, bits: int, fused: bool | None) -> None:
        self.bits, self.fused = bits, fused
        self._levels = lookup_table(levels, bits)
        if fused is not False:
            self._per = max(8 // bits, 1)
            index = np.arange(1 << self._per * bits)
            groups = [levels[index >> (bits * j) & ((1 << bits) - 1)] for j in range(self._per)]
            self._groups = mx.array(np.stack(groups).astype(np.float32))
            mx.eval(self._groups)

    def values(self, words: mx.array) -> mx.array:
        """The levels ``(B, H, n, D)`` of ``words`` ``(B, H, n, W)`` in float32."""
        return lookup(words, self.bits, self._levels)

    def __call__(self, q: mx.array, words: mx.array) -> mx.array:
        """``(B, H, R, n)`` for queries ``(B, H, R, D)`` and ``words`` ``(B, H, n, W)`` of D codes, in q's dtype."""
        fused = mx.default_device() == mx.cpu if self.fused is None else self.fused
        dots = self._by_tables(q) if fused and q.shape[2] <= MOST_ROWS else self._by_tiles(q)
        parts: list[mx.array] = []
        for start in range(0, words.shape[2], TILE):
            tile = after({"words": words[:, :, start : start + TILE]}, parts[-1:])
            parts.append(dots(tile["words"]))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _by_tiles(self, q: mx.array) -> Callable[[mx.array], mx.array]:
        return lambda words: q @ self.values(words).astype(q.dtype).swapaxes(-1, -2)

    def _by_tables(self, q: mx.array) -> Callable[[mx.array], mx.array]:
        *lead, dim = q.shape
        places, size = dim // self._per, self._groups.shape[1]
        tables = (q.astype(mx.float32).reshape(*lead, places, self._per) @ self._groups).reshape(*lead, -1)
        narrow = mx.uint16 if places * size <= 1 << 16 else mx.uint32
        first = mx.arange(0, places * size, size, dtype=mx.uint32).astype(narrow)

        def dots(words: mx.array) -> mx.array:
            index = unpack_wide(words, self._per * self.bits).astype(narrow) + first
            b, h, n, _ = index.shape
            index = mx.broadcast_to(index.reshape(b, h, 1, n * places), (*lead, n * places))
            return mx.take_along_axis(tables, index, axis=-1).reshape(*lead, n, places).sum(-1).astype(q.dtype)

        return dots
