"""Rows as indices into product codebooks, after their channels were made alike (VecInfer, arXiv 2510.06175)."""

from __future__ import annotations

import copy
from functools import cache
from importlib.resources import files

import mlx.core as mx
import numpy as np

from ..transforms.base import Transform
from .base import Axis, Codec, Codes, Readable, after, cast, compute_dtype
from .basis import sampled
from .levels import lloyd_max
from .product import entries_of, look_up, nearest, pack_index, tables, unpack_index
from .universal import SEED, universal_codebook

SHIPPED = "normal_codebook_12_4.npy"  # 4096 entries of 4 numbers, for normal vectors; float16
FLOOR, TINY = 1e-4, 1e-30  # least smoothing factor, and what divides in the place of 0
ENOUGH = 512  # rows that a codebook is fitted on; fewer make do with the universal one
SWEEPS, PER_ENTRY, LEAST = 3, 8, 1 << 14  # of the fit on a prompt, which begins at the universal codebook
TABLE_ROWS = 8  # query rows up to which scores come from tables, and sums from histograms


@cache
def normal_codebook(bits: int, dim: int) -> mx.array:
    """The universal codebook ``(1, 1, 2 ** bits, dim)`` float16 for vectors of standard normal numbers."""
    if (bits, dim) == (12, 4):
        with files("veloxquant_mlx.codecs").joinpath(SHIPPED).open("rb") as file:
            book = np.load(file)
    elif dim == 1 and bits <= 8:
        book = lloyd_max(bits)[:, None].astype(np.float16)
    else:
        book = universal_codebook(1 << bits, dim, False, SEED)
    out = mx.array(np.array(book))[None, None]
    mx.eval(out)  # MLX streams belong to a thread: nothing lazy may stay in a cache
    return out


def refined(x: mx.array, start: np.ndarray, sweeps: int, most: int, seed: int) -> np.ndarray:
    """``start`` ``(K, d)`` moved to at most ``most`` rows of ``x`` ``(N, d)``, drawn by ``seed``: float32.

    Lloyd's algorithm, in which an entry counts as one of its own rows: so few rows do not pull it far, and an entry
    without rows stays. Waits for the device once per sweep.
    """
    if x.shape[0] > most:
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(x.shape[0])
        x = x[mx.array(order[:most].astype(np.uint32))]
    rows, centres = np.array(x).astype(np.float64), start.astype(np.float64)
    for _ in range(sweeps):
        place = np.array(nearest(x[None, None], mx.array(centres.astype(np.float32))[None, None])).reshape(-1)
        size = np.bincount(place, minlength=len(centres))[:, None]
        sums = np.stack([np.bincount(place, column, len(centres)) for column in rows.T], axis=1)
        centres = (sums + centres) / (size + 1)
    return centres.astype(np.float32)


def smoothing(x: mx.array) -> mx.array:
    """The root of the largest size of each channel ``(..., 1, D)`` of rows ``(..., n, D)``."""
    return mx.maximum(mx.sqrt(mx.abs(x).max(axis=-2, keepdims=True)), FLOOR)


def spread(x: mx.array) -> mx.array:
    """The root mean square ``(..., 1, 1)`` of all numbers of a head's rows ``(..., n, D)``."""
    return mx.sqrt(mx.square(x).mean(axis=(-2, -1), keepdims=True))


def divided(x: mx.array, size: mx.array) -> mx.array:
    """``x / size``; a head of zeros has size 0, and decodes to zeros whatever its codes are."""
    return x / mx.maximum(size, TINY)


class ProductVectors(Codec):
    """``x ~ smooth * T(c)``: ``c`` are entries of ``book``, one per ``sub`` numbers; ``T`` is ``turn`` or nothing.

    ``smooth`` ``(H | 1, D | 1)`` and ``book`` ``(H | 1, P | 1, 2 ** bits, sub)`` may be given; what is not is fitted.
    With ``channels`` (keys) ``smooth`` is the root of the largest number of each channel, and rows are always turned.
    Without a ``book`` it takes in the spread that a head has after that, so that heads share a codebook: that of the
    sequence, or on fewer than 512 rows the universal one, for which values are turned too. Fitted arrays: ``smooth``
    float32 ``(B, H, 1, D | 1)`` and with 512 rows ``book`` float16 ``(B, 1, 2 ** bits, sub)``. Codes: ``index`` uint8
    ``(B, H, n, bytes)``.
    """

    def __init__(
        self,
        bits: int,
        sub: int,
        turn: Transform,
        *,
        dim: int,
        channels: bool,
        fit_rows: int,
        seed: int = 0,
        smooth: mx.array | None = None,
        book: mx.array | None = None,
        turned: bool = False,
    ) -> None:
        self.bits, self.sub, self.turn, self.seed, self.channels = bits, sub, turn, seed, channels
        self.places = dim // sub
        self.layout = {"index": Axis(2, 1)}
        self._book = normal_codebook(bits, sub) if book is None else book.astype(mx.float16)
        self._own = book is not None
        self._smooth = None if smooth is None else smooth[None, :, None].astype(mx.float32)
        self._turned, self._per_sequence = channels or turned, False
        complete = self._own and (smooth is not None or not channels)
        self.fit_rows = 0 if complete else fit_rows
        mx.eval(self._book, self._smooth)

    # ------------------------------------------------------------------------------------------------------- fitting

    def fit(self, x: mx.array) -> Codes:
        x = x.astype(mx.float32)
        b, h, n, _ = x.shape
        smooth = mx.ones((b, h, 1, 1))
        if self.channels:
            smooth = smoothing(x) if self._smooth is None else mx.broadcast_to(self._smooth, (b, h, 1, x.shape[-1]))
        if self._own:
            return {"smooth": smooth}
        y = sampled(self.turn.forward(x / smooth) if self.channels else x)
        size = spread(y)
        fitted = {"smooth": smooth * size}
        if n < ENOUGH:
            return fitted
        start = np.array(self._book[0, 0].astype(mx.float32))
        most = max(LEAST, PER_ENTRY << self.bits)
        rows = divided(y, size).reshape(b, -1, self.sub)
        books = [refined(rows[i], start, SWEEPS, most, self.seed) for i in range(b)]
        return fitted | {"book": mx.array(np.stack(books).astype(np.float16))[:, None]}

    def bind(self, fitted: Codes) -> ProductVectors:
        bound = copy.copy(self)
        bound._smooth, bound.fit_rows = fitted["smooth"], 0
        if "book" in fitted:
            bound._book, bound._per_sequence = fitted["book"], True
        elif not self._own:
            bound._turned = True
        return bound

    # --------------------------------------------------------------------------------------------------------- codes

    def _folded(self, x: mx.array) -> mx.array:
        """``(B, H, n, m)`` with sequences in the place of heads where they have a codebook each."""
        return x.reshape(1, x.shape[0], -1, x.shape[-1]) if self._per_sequence else x

    def encode(self, x: mx.array) -> Codes:
        y = x.astype(mx.float32)
        y = y if self._smooth is None else divided(y, self._smooth)
        y = self.turn.forward(y) if self._turned else y
        index = nearest(self._folded(y), self._book)
        return {"index": pack_index(index, self.bits).reshape(*x.shape[:3], -1)}

    def _index(self, codes: Codes) -> mx.array:
        return unpack_index(codes["index"], self.bits, self.places)

    def _entries(self, codes: Codes) -> mx.array:
        """Rows ``(B, H, n, D)`` in float32, not turned back yet."""
        index = self._index(codes)
        return entries_of(self._folded(index), self._book).reshape(*index.shape[:3], -1)

    def _back(self, y: mx.array) -> mx.array:
        rows = self.turn.inverse(y) if self._turned else y
        return rows if self._smooth is None else rows * self._smooth

    def _on_query(self, q: mx.array) -> mx.array:
        query = q.astype(mx.float32)
        query = query if self._smooth is None else query * self._smooth
        return self.turn.on_query(query) if self._turned else query

    def readable(self, codes: Codes) -> Readable | None:
        dim, plain = self.places * self.sub, self._smooth is None and not self._turned
        if dim % 8:
            return None
        book = self._book[:, None] if self._per_sequence else self._book[None]
        out = Readable("product", self.bits, dim, codes["index"], table=book)
        return out if plain else out.behind(self._on_query, self._back)

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return cast(self._back(self._entries(codes)), dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        query = self._on_query(q)
        work, b, h, r = compute_dtype(q.dtype), *q.shape[:3]
        table = None
        if r <= TABLE_ROWS and self.n_tokens(codes) > 1 << self.bits:
            table = tables(self._folded(query), self._book).reshape(b, h, r, self.places, -1)
        parts: list[mx.array] = []
        for tile in self.tiles(codes):
            tile = after(tile, parts[-1:])
            if table is None:
                parts.append(query.astype(work) @ self._entries(tile).astype(work).swapaxes(-1, -2))
            else:
                parts.append(look_up(table, self._index(tile)))
        return (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)).astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        work = compute_dtype(p.dtype)
        mixed = self.tiled_mix(p.astype(work), codes, lambda tile: self._entries(tile).astype(work))
        return self._back(mixed).astype(p.dtype)
