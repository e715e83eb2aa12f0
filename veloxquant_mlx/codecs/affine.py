"""Affine min/max quantisation in groups, over the tokens of a channel (keys) or the channels of a token (values).

The two orientations of KIVI (Liu et al., ICML 2024, arXiv 2402.02750). ``mx.quantize`` is not used as the encoder: it
moves the scale so that zero is representable, and errors reach 0.94 of a step instead of half a step.
"""

from __future__ import annotations

from math import lcm
from typing import Literal

import mlx.core as mx
import numpy as np

from ..core.exceptions import QuantizerConfigError
from ..core.types import is_int
from .base import F16_MAX, Axis, Codec, Codes, Readable, cast, compute_dtype
from .packing import check_bits, lookup, lookup_table, pack, padded, row_multiple

# Group sizes that mx.quantized_matmul reads, and widths that it reads fast on the CPU (1, 3 and 5 bits are
# slower than decoding first; so is transpose=True at any width).
NATIVE_GROUPS = (32, 64, 128)
CPU_BITS = (2, 4, 6, 8)
GPU_BITS = (2, 3, 4, 5, 6, 8)
# Just under half the smallest float16: makes scales below the normal range round up, so that no code is clipped there.
ROUND_UP = 2.0**-25 * (1 - 2.0**-10)


class _Affine(Codec):
    """Codes of a matrix ``(B, H, rows, columns)`` in groups along the columns, ``x ~ scales * code + biases``.

    Parameters are float16 and are rounded before the codes are computed. For 2 bits and more the error is at most half
    a step plus the rounding of the parameters, ``2**-11 * (|biases| + range)``. One bit stores the means below and
    above the group's mean instead of its ends: min/max there is worse than storing nothing.
    """

    def __init__(self, bits: int, group: int) -> None:
        self.bits = check_bits(bits)
        if not is_int(group) or group < 2:
            raise QuantizerConfigError(f"group={group!r}: must be an int of at least 2, for example 32, 64 or 128")
        self.group = group
        self._table = lookup_table(np.arange(1 << bits), bits)

    def _quantize(self, groups: mx.array, axis: int) -> tuple[mx.array, mx.array, mx.array]:
        """Codes (float32, whole), scales and biases of float32 groups that run along ``axis``."""
        low, high = self._ends(groups, axis)
        biases = mx.clip(low, -F16_MAX, F16_MAX).astype(mx.float16)
        low = biases.astype(mx.float32)
        top = (1 << self.bits) - 1
        scales = (mx.maximum(high - low, 0.0) * (1 / top) + ROUND_UP).astype(mx.float16)
        step = mx.maximum(scales.astype(mx.float32), 2.0**-24)
        codes = mx.clip(mx.round((groups - low) / step), 0.0, top)
        return codes, scales.squeeze(axis), biases.squeeze(axis)

    def _ends(self, groups: mx.array, axis: int) -> tuple[mx.array, mx.array]:
        """The values of the lowest and the highest code; a scale between them fits in float16."""
        if self.bits > 1:
            return groups.min(axis, keepdims=True), mx.minimum(groups.max(axis, keepdims=True), F16_MAX)
        groups = mx.clip(groups, -F16_MAX, F16_MAX)
        above = groups > groups.mean(axis, keepdims=True)
        count = above.sum(axis, keepdims=True)
        high = mx.where(above, groups, 0.0).sum(axis, keepdims=True) / mx.maximum(count, 1)
        low = mx.where(above, 0.0, groups).sum(axis, keepdims=True) / mx.maximum(self.group - count, 1)
        return low, mx.where(count > 0, mx.minimum(high, low + F16_MAX), low)

    def _levels(self, codes: Codes) -> mx.array:
        """The whole numbers that the codes stand for, float32 ``(B, H, rows, columns)``."""
        return lookup(codes["words"], self.bits, self._table)

    def _decode(self, codes: Codes, dtype: mx.Dtype) -> mx.array:
        values = self._levels(codes)
        groups = values.reshape(*values.shape[:-1], -1, self.group)
        out = groups * codes["scales"].astype(mx.float32)[..., None] + codes["biases"].astype(mx.float32)[..., None]
        return cast(out.reshape(values.shape), dtype)

    def _native(self, transpose: bool) -> bool:
        if self.group not in NATIVE_GROUPS:
            return False
        if mx.default_device() == mx.gpu:
            return self.bits in GPU_BITS
        return self.bits in CPU_BITS and not transpose

    def _product(self, x: mx.array, codes: Codes, transpose: bool) -> mx.array:
        # MLX promotes bfloat16 with float16 parameters to float32 by itself; float32 with float16 costs 5 % (CPU).
        wide = x.astype(compute_dtype(x.dtype))
        # The CUDA back end refuses views with gaps (MLX 0.32.4); the CPU copies them by itself.
        words, scales, biases = (_rows(codes[name]) for name in ("words", "scales", "biases"))
        out = mx.quantized_matmul(wide, words, scales, biases, transpose, group_size=self.group, bits=self.bits)
        return out.astype(x.dtype)


def _rows(x: mx.array) -> mx.array:
    """``x`` row by row. A transposed column counts as contiguous, but its strides are none that CUDA takes."""
    return mx.contiguous(x) if x.shape[-1] > 1 else x.reshape(-1).reshape(x.shape)


class ChannelAffine(_Affine):
    """Groups of ``group`` consecutive tokens of one channel, stored transposed (keys).

    Codes: ``words`` uint32 ``(B, H, D, n * bits / 32)``, ``scales`` and ``biases`` float16 ``(B, H, D, n / group)``.
    """

    def __init__(self, bits: int, group: int = 32) -> None:
        super().__init__(bits, group)
        self.block = lcm(group, row_multiple(bits))  # whole words
        params = Axis(-1, self.block // group)
        self.layout = {"words": Axis(-1, self.block * bits // 32), "scales": params, "biases": params}

    def encode(self, x: mx.array) -> Codes:
        *lead, n, dim = x.shape
        groups = x.astype(mx.float32).reshape(*lead, n // self.group, self.group, dim)
        codes, scales, biases = self._quantize(groups, -2)
        words = pack(codes.astype(mx.uint8).reshape(x.shape).swapaxes(-1, -2), self.bits)
        return {"words": words, "scales": scales.swapaxes(-1, -2), "biases": biases.swapaxes(-1, -2)}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return self._decode(codes, dtype).swapaxes(-1, -2)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        return self._product(q, codes, False) if self._native(False) else super().scores(q, codes)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        return self._product(p, codes, True) if self._native(True) else super().mix(p, codes)

    def readable(self, codes: Codes) -> Readable | None:
        dim = codes["words"].shape[2]
        arrays = (codes["words"], codes["scales"], codes["biases"])
        return Readable("channel_affine", self.bits, dim, *arrays, group=self.group) if dim % 8 == 0 else None


class TokenAffine(_Affine):
    """Groups of ``group`` consecutive channels of one token (values).

    Codes: ``words`` uint32 ``(B, H, n, padded_dim * bits / 32)``, ``scales`` and ``biases`` float16
    ``(B, H, n, padded_dim / group)``. Rows are padded to whole groups and to a multiple of 32 by repeating the last
    channel; a group longer than the row is shortened to it, which changes no value.
    """

    def __init__(self, bits: int, group: int = 32, *, dim: int) -> None:
        super().__init__(bits, min(group, padded(dim, 32)) if isinstance(group, int) else group)
        self.dim, self.padded_dim = dim, padded(dim, self.group, 32)
        self.layout = {"words": Axis(-2, 1), "scales": Axis(-2, 1), "biases": Axis(-2, 1)}

    def encode(self, x: mx.array) -> Codes:
        x = self._pad(x.astype(mx.float32), mode="edge")
        codes, scales, biases = self._quantize(x.reshape(*x.shape[:-1], -1, self.group), -1)
        return {"words": pack(codes.reshape(x.shape), self.bits), "scales": scales, "biases": biases}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return self._decode(codes, dtype)[..., : self.dim]

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        if not self._native(True):
            return super().scores(q, codes)
        return self._product(self._pad(q, mode="constant"), codes, True)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        if not self._native(False):
            return super().mix(p, codes)
        return self._product(p, codes, False)[..., : self.dim]

    def readable(self, codes: Codes) -> Readable | None:
        if self.dim % 8 or self.group % 8:
            return None
        arrays = (codes["words"], codes["scales"], codes["biases"])
        return Readable("token_affine", self.bits, self.dim, *arrays, group=self.group)

    def _pad(self, x: mx.array, mode: Literal["constant", "edge"]) -> mx.array:
        spare = self.padded_dim - self.dim
        return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, spare)], mode=mode) if spare else x
