"""Windows of rows normalised, shifted and normalised again, then coded by a universal vector codebook (NSNQuant).

Paper: Son, Choi, Yoo, "NSNQuant: A Double Normalization Approach for Calibration-Free Low-Bit Vector Quantization of KV
Cache", arXiv 2505.18231.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ..transforms.base import Transform
from .base import F16_MAX, Axis, Codec, Codes, after, cast, compute_dtype
from .packing import lookup, lookup_table, pack_bytes, padded, unpack
from .product import entries_of, look_up, nearest, pack_index, tables, unpack_index

SCALAR_BITS = 4
TABLE_ROWS = 8  # query rows up to which scores come from tables
SIGNS = np.array([-1.0, 1.0], dtype=np.float32)


class NSN(Codec):
    """``x ~ s1 (s2 c + o)`` per row: ``o`` is shared by a window of ``window`` rows, ``c`` comes from the codebook.

    A row is divided by its rms ``s1``, the window's mean ``o`` is taken off, what is left is divided by its rms and
    turned by ``transform`` (orthogonal): nearly standard normal for any model. ``book`` ``(K, d)`` codes sub-vectors of
    ``d`` numbers, their magnitudes where ``signed`` says that every sign is stored. ``s2`` is fitted last, by least
    squares. ``s1`` and ``o`` are rounded to 4 bits before what follows is computed, so that later steps make up for it.

    Codes: ``index`` uint8 ``(B, H, n, bytes)``, ``signs`` uint8 ``(B, H, n, D / 8)`` where ``signed``, ``spread`` (s2)
    float16 ``(B, H, n)``; per window ``sizes`` (s1) uint8 ``(B, H, n / window, window / 2)``, ``shift`` (o) uint8
    ``(..., D / 2)``, and step and low end of both, ``size_ends`` and ``shift_ends`` float16 ``(..., 2)``. Rows are
    padded with zeros to whole sub-vectors.
    """

    def __init__(self, dim: int, window: int, book: np.ndarray, signed: bool, transform: Transform) -> None:
        self.dim, self.block, self.signed, self.transform = dim, window, signed, transform
        count, self.sub = book.shape
        self.index_bits = count.bit_length() - 1
        self.padded_dim = padded(dim, self.sub)
        self.book = mx.array(book)[None, None]
        mx.eval(self.book)
        row, block = Axis(2, window), Axis(2, 1)
        self.layout = {"index": row, "spread": row}
        self.layout |= dict.fromkeys(("sizes", "size_ends", "shift", "shift_ends"), block)
        if signed:
            self.layout |= {"signs": row}
        self._signs = lookup_table(SIGNS, 1)

    @property
    def bits(self) -> float:
        """Bits per number of the codes alone."""
        return self.index_bits / self.sub + self.signed

    def normalise(self, x: mx.array) -> tuple[mx.array, mx.array, Codes]:
        """Rows ``(B, H, windows, window, D)`` of rms one, not yet turned, ``s2`` of each, and codes of the rest."""
        x = mx.clip(x.astype(mx.float32), -F16_MAX, F16_MAX)
        groups = x.reshape(*x.shape[:2], -1, self.block, self.dim)
        sizes, size_ends = _round(_rms(groups))
        size = _rounded(sizes, size_ends)[..., None]
        # a size that rounds to zero decodes to zeros, whatever its row
        rows = mx.where(size > 0, groups / mx.maximum(size, 1e-30), 0.0)
        shift, shift_ends = _round(rows.mean(-2))
        rows = rows - _rounded(shift, shift_ends)[..., None, :]
        spread = _rms(rows)[..., None]
        codes = {"sizes": pack_bytes(sizes, SCALAR_BITS), "shift": pack_bytes(shift, SCALAR_BITS)}
        codes |= {"size_ends": size_ends, "shift_ends": shift_ends}
        return rows / mx.maximum(spread, 1e-30), spread, codes

    def encode(self, x: mx.array) -> Codes:
        z, spread, codes = self.normalise(x)
        z = self.transform.forward(z).reshape(x.shape)
        if self.padded_dim > self.dim:
            z = mx.pad(z, [(0, 0)] * 3 + [(0, self.padded_dim - self.dim)])
        codes["index"] = pack_index(nearest(mx.abs(z) if self.signed else z, self.book), self.index_bits)
        if self.signed:
            codes["signs"] = pack_bytes(z >= 0, 1)
        c = self._vectors(codes)
        fit = mx.maximum((z * c).sum(-1) / mx.maximum((c * c).sum(-1), 1e-30), 0.0)
        return codes | {"spread": cast(spread.reshape(fit.shape) * fit, mx.float16)}

    def _vectors(self, codes: Codes) -> mx.array:
        """Code vectors ``(B, H, n, padded D)`` in float32, in the turned basis."""
        index = unpack_index(codes["index"], self.index_bits, self.padded_dim // self.sub)
        rows = entries_of(index, self.book)
        return rows * lookup(codes["signs"], 1, self._signs)[..., : self.padded_dim] if self.signed else rows

    def _sizes(self, codes: Codes) -> tuple[mx.array, mx.array]:
        """``s1`` per row ``(B, H, n)`` and ``o`` per window ``(B, H, windows, D)``, in float32."""
        size = _rounded(unpack(codes["sizes"], SCALAR_BITS, self.block), codes["size_ends"])
        shift = _rounded(unpack(codes["shift"], SCALAR_BITS, self.dim), codes["shift_ends"])
        return size.reshape(*size.shape[:2], -1), shift

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        size, shift = self._sizes(codes)
        rows = self._vectors(codes)[..., : self.dim] * codes["spread"].astype(mx.float32)[..., None]
        rows = self.transform.inverse(rows).reshape(*shift.shape[:3], self.block, self.dim) + shift[..., None, :]
        return cast(rows.reshape(*size.shape, self.dim) * size[..., None], dtype)

    # ------------------------------------------------------------------------------------------------------ attention

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        """The query is turned, not the rows; without signs, few query rows look every sub-vector up in tables."""
        work = compute_dtype(q.dtype)
        turned = self.transform.on_query(q)
        if self.padded_dim > self.dim:
            turned = mx.pad(turned, [(0, 0)] * 3 + [(0, self.padded_dim - self.dim)])
        dots = self._dots(turned, work)
        parts: list[mx.array] = []
        for tile in self.tiles(codes):
            tile = after(tile, parts[-1:])
            size, shift = self._sizes(tile)
            own = dots(tile).astype(mx.float32) * tile["spread"].astype(mx.float32)[:, :, None]
            common = mx.repeat(q.astype(mx.float32) @ shift.swapaxes(-1, -2), self.block, axis=-1)
            parts.append(((own + common) * size[:, :, None]).astype(q.dtype))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _dots(self, q: mx.array, work: mx.Dtype) -> Callable[[Codes], mx.array]:
        few = q.shape[2] <= TABLE_ROWS and mx.default_device() == mx.cpu
        if self.signed or not few:
            return lambda tile: q.astype(work) @ self._vectors(tile).astype(work).swapaxes(-1, -2)
        made = tables(q, self.book)
        return lambda tile: look_up(made, unpack_index(tile["index"], self.index_bits, self.padded_dim // self.sub))

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        """The sum of code vectors is turned back once; shifts are summed per window."""
        work = compute_dtype(p.dtype)
        own = common = mx.array(0.0)
        start = 0
        for tile in self.tiles(codes):
            tile = after(tile, [own] if start else [])
            size, shift = self._sizes(tile)
            n = size.shape[2]
            weights = p[..., start : start + n].astype(mx.float32) * size[:, :, None]
            sized = (weights * tile["spread"].astype(mx.float32)[:, :, None]).astype(work)
            own = own + (sized @ self._vectors(tile)[..., : self.dim].astype(work)).astype(mx.float32)
            common = common + weights.reshape(*p.shape[:3], -1, self.block).sum(-1) @ shift
            start += n
        return (self.transform.inverse(own) + common).astype(p.dtype)


def _rms(x: mx.array) -> mx.array:
    return mx.sqrt((x * x).mean(-1))


def _round(x: mx.array) -> tuple[mx.array, mx.array]:
    """4-bit codes uint8 of ``x`` ``(..., n)`` and the float16 step and low end ``(..., 2)`` of each row."""
    low = cast(x.min(-1, keepdims=True), mx.float16)
    span = mx.minimum(x.max(-1, keepdims=True), F16_MAX) - low.astype(mx.float32)
    step = (mx.maximum(span, 0.0) / ((1 << SCALAR_BITS) - 1)).astype(mx.float16)
    codes = mx.round((x - low.astype(mx.float32)) / mx.maximum(step.astype(mx.float32), 2.0**-24))
    return mx.clip(codes, 0, (1 << SCALAR_BITS) - 1).astype(mx.uint8), mx.concatenate([step, low], axis=-1)


def _rounded(codes: mx.array, ends: mx.array) -> mx.array:
    step, low = mx.split(ends.astype(mx.float32), 2, axis=-1)
    return codes.astype(mx.float32) * step + low
