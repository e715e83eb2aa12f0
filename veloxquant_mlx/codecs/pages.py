"""Pages of tokens in which the strongest channels get more bits, as one low plane and a compact high plane.

The key layout of Kitty (Xia et al., MLSys 2026, arXiv 2511.18643).
"""

from __future__ import annotations

from math import floor

import mlx.core as mx

from ..core.exceptions import QuantizerConfigError
from ..core.types import is_int
from .affine import ChannelAffine
from .base import Axis, Codec, Codes, Readable
from .packing import lookup, pack, padded, row_multiple


def page_multiple(low: int, high: int, group: int) -> int:
    """A page must be a multiple of this many tokens: whole groups, and whole words in both planes."""
    return padded(group, row_multiple(low), row_multiple(high - low) if high > low else 1)


class PagedAffine(ChannelAffine):
    """``ChannelAffine`` of ``low`` bits; in every page, the channels of largest mean ``|x|`` have ``high`` bits.

    ``fraction`` of the ``dim`` channels are boosted (rounded down), anew in every page of ``page`` tokens. A code is
    split, ``low plane + 2**low * high plane``. Codes: those of ``ChannelAffine`` hold the low plane of all channels
    and the parameters; ``high`` uint32 ``(B, H, pages, boosted, page * (high - low) / 32)`` the high plane of the
    boosted ones, whose channels ``boosted`` ``(B, H, pages, boosted)`` names (uint8; uint16 beyond 256 channels). The
    paper keeps one byte for every channel of a page; naming the boosted ones alone takes less.
    """

    def __init__(self, low: int, high: int, fraction: float, group: int, page: int, *, dim: int) -> None:
        super().__init__(low, group)
        self._fine = ChannelAffine(high, group)
        if high < low:
            raise QuantizerConfigError(f"high={high}: must be at least low={low}. Raise high.")
        multiple = page_multiple(low, high, group)
        if not is_int(page) or page < 1 or page % multiple:
            raise QuantizerConfigError(
                f"page={page!r}: must be a multiple of {multiple}, whole groups of {group} tokens in whole words"
            )
        self.block = page
        # Guards floor against products such as 0.29 * 100 = 28.999999999999996.
        self.boosted = floor(dim * fraction + 1e-9) if high > low else 0
        self.index_dtype = mx.uint8 if dim <= 256 else mx.uint16
        params = Axis(-1, page // group)
        self.layout = {"words": Axis(-1, page * low // 32), "scales": params, "biases": params}
        if self.boosted:
            self._plane = ChannelAffine(high - low, group)
            self.layout |= {"high": Axis(2, 1), "boosted": Axis(2, 1)}

    def encode(self, x: mx.array) -> Codes:
        b, h, n, dim = x.shape
        # (B, H, pages, groups, tokens of a group, D)
        groups = x.astype(mx.float32).reshape(b, h, n // self.block, -1, self.group, dim)
        codes, scales, biases = self._quantize(groups, -2)
        out: Codes = {}
        if self.boosted:
            index = self._strongest(groups)
            on = mx.put_along_axis(mx.zeros((b, h, n // self.block, dim), mx.bool_), index, mx.array(True), axis=-1)
            fine = self._fine._quantize(groups, -2)
            codes = mx.where(on[:, :, :, None, None], fine[0], codes)
            scales = mx.where(on[:, :, :, None], fine[1], scales)
            biases = mx.where(on[:, :, :, None], fine[2], biases)
            upper = (codes.astype(mx.uint8) >> self.bits).reshape(b, h, -1, self.block, dim).swapaxes(-1, -2)
            out["high"] = pack(mx.take_along_axis(upper, index[..., None], axis=-2), self._plane.bits)
            out["boosted"] = index.astype(self.index_dtype)
        lower = (codes.astype(mx.uint8) & ((1 << self.bits) - 1)).reshape(x.shape).swapaxes(-1, -2)
        out["words"] = pack(lower, self.bits)
        for name, params in (("scales", scales), ("biases", biases)):
            out[name] = params.reshape(b, h, -1, dim).swapaxes(-1, -2)
        return out

    def _strongest(self, groups: mx.array) -> mx.array:
        """Channels ``(B, H, pages, boosted)`` to boost, ascending; of equal ones those that come first."""
        strength = mx.abs(groups).mean((-3, -2))
        return mx.sort(mx.argsort(-strength, axis=-1)[..., : self.boosted], axis=-1)

    def _levels(self, codes: Codes) -> mx.array:
        low = super()._levels(codes)
        if not self.boosted:
            return low
        b, h, dim, _ = low.shape
        pages = low.reshape(b, h, dim, -1, self.block).swapaxes(2, 3)
        high, index = lookup(codes["high"], self._plane.bits, self._plane._table), codes["boosted"][..., None]
        both = mx.take_along_axis(pages, index, axis=-2) + (1 << self.bits) * high
        return mx.put_along_axis(pages, index, both, axis=-2).swapaxes(2, 3).reshape(low.shape)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        if not self._native(False) or (self.boosted and not self._plane._native(False)):
            return Codec.scores(self, q, codes)
        low = self._product(q, codes, False)
        return low + self._boost(q, codes) if self.boosted else low

    def _boost(self, q: mx.array, codes: Codes) -> mx.array:
        """What the high plane adds to the scores ``(B, H, R, n)``: one product with the page as a batch axis."""
        b, h, rows, dim = q.shape
        index = codes["boosted"]
        queries = mx.take_along_axis(q[:, :, None], index[..., None, :], axis=-1)
        scales = codes["scales"].reshape(b, h, dim, index.shape[2], -1).swapaxes(2, 3)
        scales = mx.take_along_axis(scales, index[..., None], axis=-2) * (1 << self.bits)
        plane = {"words": codes["high"], "scales": scales, "biases": mx.zeros_like(scales)}
        # (B, H, pages, R, page)
        return self._plane._product(queries, plane, False).swapaxes(2, 3).reshape(b, h, rows, -1)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        return Codec.mix(self, p, codes)

    def readable(self, codes: Codes) -> Readable | None:
        return None if self.boosted else super().readable(codes)
