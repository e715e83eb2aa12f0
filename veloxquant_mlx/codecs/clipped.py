"""Groups of channels of one token, reordered so that like channels meet, with clipped ranges and 8-bit parameters.

The codec of SKVQ (Duanmu et al., COLM 2024, arXiv 2405.06219).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx

from .affine import ROUND_UP, TokenAffine
from .base import F16_MAX, Codec, Codes

# Factors on both ends of a group's range. 1 is among them: shrinking a one-sided range towards zero misplaces it.
ALPHAS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85)
# E4M3 ends at 448 and has whole precision from 2**-6 on. The sign bit of the range, which is never negative, says in
# which unit both parameters of a group are counted: together the units reach from 2**-12 beyond all of float16.
FP8_MAX = 448.0
FINE, COARSE = 2.0**-3, 2.0**8
ROWS = 256  # tokens encoded at a time: the search holds a copy of them per factor


def _pack8(low: mx.array, high: mx.array) -> tuple[mx.array, mx.array]:
    """Ranges and low ends as bytes; the range is measured from the low end as it was rounded."""
    coarse = mx.maximum(mx.abs(low), high - low) > FP8_MAX * FINE
    unit = mx.where(coarse, COARSE, FINE)
    biases = mx.to_fp8(mx.clip(low / unit, -FP8_MAX, FP8_MAX))
    span = mx.to_fp8(mx.clip(high / unit - mx.from_fp8(biases, mx.float32), 0.0, FP8_MAX))
    return span | (coarse.astype(mx.uint8) << 7), biases


def _unpack8(scales: mx.array, biases: mx.array, top: int) -> tuple[mx.array, mx.array]:
    """Step and low end in float16 of what ``_pack8`` made; ``top`` steps are the range."""
    unit = mx.where(scales > 127, COARSE, FINE)
    span, low = mx.from_fp8(scales & 127, mx.float32) * unit, mx.from_fp8(biases, mx.float32) * unit
    return mx.minimum(span / top, F16_MAX).astype(mx.float16), mx.clip(low, -F16_MAX, F16_MAX).astype(mx.float16)


class ClippedToken(TokenAffine):
    """``TokenAffine`` whose groups are found in the first ``fit_rows`` rows (0: channels stay in order).

    ``alphas`` are tried on both ends of every group; the one with the least squared error is folded into the
    parameters. With ``fp8`` a group has two bytes of parameters: codes ``scales`` (the range, E4M3) and ``biases``
    (the low end, E4M3), both uint8 ``(B, H, n, padded_dim / group)``; without, float16 as in ``TokenAffine``. Codes
    are computed with the rounded parameters. Fitted array: ``perm`` uint16 ``(B, H, D)``, place to channel.
    """

    def __init__(
        self,
        bits: int,
        group: int = 32,
        *,
        dim: int,
        alphas: Sequence[float] = ALPHAS,
        fp8: bool = True,
        fit_rows: int = 0,
    ) -> None:
        super().__init__(bits, group, dim=dim)
        self.alphas, self.fp8, self.fit_rows = tuple(alphas), fp8, fit_rows
        self._perm: mx.array | None = None

    # ------------------------------------------------------------------------------------------------- reordering

    def fit(self, x: mx.array) -> Codes:
        """The order of channels whose groups have the least mean squared range over ``x`` ``(B, H, N, D)``.

        Orders by the channels' low ends, high ends, middles and ranges compete, and the order as it came.
        """
        x = x.astype(mx.float32)
        low, high = x.min(axis=2), x.max(axis=2)
        natural = mx.broadcast_to(mx.arange(self.dim, dtype=mx.uint32), low.shape)
        orders = mx.stack([natural, *(mx.argsort(key, axis=-1) for key in (low, high, low + high, high - low))])
        groups = self._grouped(mx.stack([_take(x, order) for order in orders]))
        cost = mx.square(groups.max(-1) - groups.min(-1)).mean((-1, -2))
        best = mx.argmin(cost, axis=0)[None, :, :, None]
        return {"perm": mx.take_along_axis(orders, best, axis=0)[0].astype(mx.uint16)}

    def bind(self, fitted: Codes) -> ClippedToken:
        """This codec with the order of ``fit``."""
        bound = copy.copy(self)
        bound._perm = fitted["perm"]
        return bound

    def _reordered(self, x: mx.array) -> mx.array:
        return x if self._perm is None else _take(x, self._perm)

    def _in_order(self, y: mx.array) -> mx.array:
        return y if self._perm is None else _take(y, mx.argsort(self._perm, axis=-1))

    # ------------------------------------------------------------------------------------------------- codes

    def _grouped(self, x: mx.array) -> mx.array:
        x = self._pad(x, mode="edge")
        return x.reshape(*x.shape[:-1], -1, self.group)

    def _quantize(self, groups: mx.array, axis: int) -> tuple[mx.array, mx.array, mx.array]:
        low, high = self._ends(groups, axis)
        # All factors at once: single tokens cost a few operations, not a few per factor.
        factors = mx.array(self.alphas).reshape(-1, *[1] * groups.ndim)
        stored = self._close(low * factors, high * factors)
        if len(self.alphas) > 1:
            step, bias = (p.astype(mx.float32) for p in self._open(*stored))
            error = mx.square(self._nearest(groups, step, bias) * step + bias - groups).sum(axis, keepdims=True)
            best = mx.argmin(error, axis=0, keepdims=True)
            stored = tuple(mx.take_along_axis(p, best, axis=0) for p in stored)
        scales, biases = (p[0] for p in stored)
        step, bias = (p.astype(mx.float32) for p in self._open(scales, biases))
        return self._nearest(groups, step, bias), scales.squeeze(axis), biases.squeeze(axis)

    def _nearest(self, groups: mx.array, step: mx.array, bias: mx.array) -> mx.array:
        return mx.clip(mx.round((groups - bias) / mx.maximum(step, 2.0**-24)), 0.0, (1 << self.bits) - 1)

    def _close(self, low: mx.array, high: mx.array) -> tuple[mx.array, mx.array]:
        """Stored parameters of a range whose ends are in float32."""
        if self.fp8:
            return _pack8(low, high)
        biases = mx.clip(low, -F16_MAX, F16_MAX).astype(mx.float16)
        span = mx.maximum(high - biases.astype(mx.float32), 0.0)
        return (span * (1 / ((1 << self.bits) - 1)) + ROUND_UP).astype(mx.float16), biases

    def _open(self, scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
        return _unpack8(scales, biases, (1 << self.bits) - 1) if self.fp8 else (scales, biases)

    def _opened(self, codes: Codes) -> Codes:
        scales, biases = self._open(codes["scales"], codes["biases"])
        return {**codes, "scales": scales, "biases": biases}

    def encode(self, x: mx.array) -> Codes:
        assert self._perm is not None or not self.fit_rows, "encode before fit"
        x = self._reordered(x)
        parts = [super(ClippedToken, self).encode(x[:, :, i : i + ROWS]) for i in range(0, x.shape[2], ROWS)]
        return parts[0] if len(parts) == 1 else {n: mx.concatenate([p[n] for p in parts], axis=2) for n in parts[0]}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return self._in_order(super().decode(self._opened(codes), dtype))

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        if not self._native(True):
            return Codec.scores(self, q, codes)
        return super().scores(self._reordered(q), self._opened(codes))

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        if not self._native(False):
            return Codec.mix(self, p, codes)
        return self._in_order(super().mix(p, self._opened(codes)))


def _take(x: mx.array, order: mx.array) -> mx.array:
    """``x`` ``(B, H, n, D)`` with the channels of every head in ``order`` ``(B, H, D)``."""
    return mx.take_along_axis(x, mx.broadcast_to(order[:, :, None], x.shape), axis=-1)
