"""Symmetric quantisation of whole rows: one scale per token, zero is a level."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..core.exceptions import QuantizerConfigError
from .affine import CPU_BITS, GPU_BITS, NATIVE_GROUPS, ROUND_UP
from .base import F16_MAX, Axis, Codec, Codes, Symbols, cast, compute_dtype
from .packing import check_bits, lookup, lookup_table, pack, padded, row_multiple


class TokenSymmetric(Codec):
    """Codes ``-Q..Q`` with ``Q = 2 ** (bits - 1) - 1`` and ``scale = max|x| / Q`` for every row, the rule of CacheGen.

    Codes: ``words`` uint32 ``(B, H, n, padded_dim * bits / 32)`` holding ``code + Q``, and ``scales`` float16
    ``(B, H, n)``, rounded before the codes are computed: the error is at most half a step. Rows whose bits do not fill
    whole words are padded with zeros. ``per_channel`` is for entropy coding: a table for every channel of a head.
    """

    def __init__(self, bits: int, *, dim: int, per_channel: bool = True) -> None:
        self.bits, self.dim = check_bits(bits), dim
        if bits < 2:
            raise QuantizerConfigError(f"bits={bits!r}: symmetric codes need at least 2 bits: -1, 0 and 1.")
        self.top = (1 << (bits - 1)) - 1
        self.padded_dim = padded(dim, row_multiple(bits))
        self.layout = {"words": Axis(-2, 1), "scales": Axis(-1, 1)}
        self.symbols = {"words": Symbols(bits, per_channel)}
        self._table = lookup_table(np.arange(1 << bits) - self.top, bits)
        # quantized_matmul works on levels below 2 in size: neither they nor their scales carry float16 to infinity.
        self._unit = 2.0 ** (2 - bits)
        # Never a single group per row: on the H200, rows of 64 in one group of 64 came out wrong (MLX 0.32.4).
        self._group = next(
            (g for g in reversed(NATIVE_GROUPS) if self.padded_dim % g == 0 and g < self.padded_dim), None
        )

    def encode(self, x: mx.array) -> Codes:
        x = x.astype(mx.float32)
        peak = mx.abs(x).max(-1, keepdims=True)
        scales = mx.minimum(peak * (1 / self.top) + ROUND_UP, F16_MAX).astype(mx.float16)
        step = mx.maximum(scales.astype(mx.float32), 2.0**-24)
        codes = (mx.clip(mx.round(x / step), -self.top, self.top) + self.top).astype(mx.uint8)
        if self.padded_dim > self.dim:
            codes = mx.pad(codes, [(0, 0)] * (x.ndim - 1) + [(0, self.padded_dim - self.dim)])
        return {"words": pack(codes, self.bits), "scales": scales[..., 0]}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        levels = lookup(codes["words"], self.bits, self._table)[..., : self.dim]
        return cast(levels * codes["scales"].astype(mx.float32)[..., None], dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        if not self._native(True):
            return super().scores(q, codes)
        spare = self.padded_dim - self.dim
        dots = self._product(mx.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, spare)]) if spare else q, codes, True)
        return (dots.astype(mx.float32) * self._sizes(codes)).astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        if not self._native(False):
            return super().mix(p, codes)
        weights = (p.astype(mx.float32) * self._sizes(codes)).astype(p.dtype)
        return self._product(weights, codes, False)[..., : self.dim].astype(p.dtype)

    def _native(self, transpose: bool) -> bool:
        if self._group is None:
            return False
        if mx.default_device() == mx.gpu:
            return self.bits in GPU_BITS
        return self.bits in CPU_BITS and not transpose

    def _sizes(self, codes: Codes) -> mx.array:
        """What a level of 1 stands for in every row, ``(B, H, 1, n)`` float32."""
        return codes["scales"].astype(mx.float32)[..., None, :] * (1 / self._unit)

    def _product(self, x: mx.array, codes: Codes, transpose: bool) -> mx.array:
        """``x`` times the levels ``(code - Q) * 2 ** (2 - bits)``, which are exact in float16."""
        assert self._group is not None
        work = compute_dtype(x.dtype)
        words = mx.contiguous(codes["words"])  # the CUDA back end refuses views with gaps (MLX 0.32.4)
        shape = (*words.shape[:-1], self.padded_dim // self._group)
        scales, biases = mx.full(shape, self._unit, work), mx.full(shape, -self.top * self._unit, work)
        return mx.quantized_matmul(
            x.astype(work), words, scales, biases, transpose, group_size=self._group, bits=self.bits
        )
