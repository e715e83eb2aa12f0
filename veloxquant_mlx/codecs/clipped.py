"""Groups of channels of one token with clipped ranges and 8-bit parameters.

From SKVQ (Duanmu et al., COLM 2024, arXiv 2405.06219); ``codecs.clustered`` has its groups of channels that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from .affine import ROUND_UP, TokenAffine
from .base import F16_MAX, Codec, Codes, Readable

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
    """``TokenAffine`` with clipped ranges.

    ``alphas`` are tried on both ends of every group; the one with the least squared error is folded into the
    parameters. With ``fp8`` a group has two bytes of parameters: codes ``scales`` (the range, E4M3) and ``biases``
    (the low end, E4M3), both uint8 ``(B, H, n, padded_dim / group)``; without, float16 as in ``TokenAffine``. Codes
    are computed with the rounded parameters.
    """

    def __init__(
        self, bits: int, group: int = 32, *, dim: int, alphas: Sequence[float] = ALPHAS, fp8: bool = True
    ) -> None:
        super().__init__(bits, group, dim=dim)
        self.alphas, self.fp8 = tuple(alphas), fp8

    def _quantize(self, groups: mx.array, axis: int) -> tuple[mx.array, mx.array, mx.array]:
        def error(step: mx.array, bias: mx.array) -> mx.array:
            return mx.square(self._nearest(groups, step, bias) * step + bias - groups).sum(axis, keepdims=True)

        scales, biases = self._chosen(*self._ends(groups, axis), error)
        codes = self._nearest(groups, *self._wide(scales, biases))
        return codes, scales.squeeze(axis), biases.squeeze(axis)

    def _chosen(
        self, low: mx.array, high: mx.array, error: Callable[[mx.array, mx.array], mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Stored parameters of ranges whose ends are in float32, with the factor of the least ``error(step, bias)``."""
        # All factors at once: single tokens cost a few operations, not a few per factor.
        factors = mx.array(self.alphas).reshape(-1, *[1] * low.ndim)
        stored = self._close(low * factors, high * factors)
        if len(self.alphas) > 1:
            best = mx.argmin(error(*self._wide(*stored)), axis=0, keepdims=True)
            stored = tuple(mx.take_along_axis(p, best, axis=0) for p in stored)
        return stored[0][0], stored[1][0]

    def _nearest(self, x: mx.array, step: mx.array, bias: mx.array) -> mx.array:
        return mx.clip(mx.round((x - bias) / mx.maximum(step, 2.0**-24)), 0.0, (1 << self.bits) - 1)

    def _close(self, low: mx.array, high: mx.array) -> tuple[mx.array, mx.array]:
        """Stored parameters of a range whose ends are in float32."""
        if self.fp8:
            return _pack8(low, high)
        biases = mx.clip(low, -F16_MAX, F16_MAX).astype(mx.float16)
        span = mx.maximum(high - biases.astype(mx.float32), 0.0)
        return (span * (1 / ((1 << self.bits) - 1)) + ROUND_UP).astype(mx.float16), biases

    def _open(self, scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
        return _unpack8(scales, biases, (1 << self.bits) - 1) if self.fp8 else (scales, biases)

    def _wide(self, scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
        """Step and low end in float32."""
        step, bias = self._open(scales, biases)
        return step.astype(mx.float32), bias.astype(mx.float32)

    def _opened(self, codes: Codes) -> Codes:
        scales, biases = self._open(codes["scales"], codes["biases"])
        return {**codes, "scales": scales, "biases": biases}

    def encode(self, x: mx.array) -> Codes:
        parts = [super(ClippedToken, self).encode(x[:, :, i : i + ROWS]) for i in range(0, x.shape[2], ROWS)]
        return parts[0] if len(parts) == 1 else {n: mx.concatenate([p[n] for p in parts], axis=2) for n in parts[0]}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return super().decode(self._opened(codes), dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        return super().scores(q, self._opened(codes)) if self._native(True) else Codec.scores(self, q, codes)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        return super().mix(p, self._opened(codes)) if self._native(False) else Codec.mix(self, p, codes)

    def readable(self, codes: Codes) -> Readable | None:
        return super().readable(self._opened(codes))
