"""A scalar codebook for rows whose coordinates have a known shape: one code per coordinate and one norm per row."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..core.exceptions import QuantizerConfigError
from .base import F16_MAX, Axis, Codec, Codes, Readable, cast, compute_dtype
from .packing import check_bits, level_array, pack, padded, row_multiple
from .tables import PackedDots


class Nearest:
    """How many of ``2 ** bits - 1`` ascending thresholds lie below each value."""

    def __init__(self, thresholds: np.ndarray, bits: int) -> None:
        self.bits = bits
        self._thresholds, self._tree = mx.array(thresholds.astype(np.float32)), mx.array(_search_tree(thresholds))
        mx.eval(self._thresholds, self._tree)

    def __call__(self, z: mx.array) -> mx.array:
        if z.size <= 4096 or mx.default_device() == mx.gpu:
            return mx.searchsorted(self._thresholds, z)
        # The same search as a walk down a tree in heap order: five times faster on the CPU for many values.
        flat = z.reshape(-1)
        node = (flat > self._tree[1]).astype(mx.uint8 if self.bits < 8 else mx.uint16) + 2
        for _ in range(self.bits - 1):
            node = node + node + (flat > mx.take_along_axis(self._tree, node, axis=0))
        return (node - (1 << self.bits)).reshape(z.shape)


class ScalarCodebook(Codec):
    """Nearest of ``2 ** bits`` levels for every coordinate of ``x / rms(x)``, and the rms of the row in float16.

    Codes: ``words`` uint32 ``(B, H, n, padded_dim * bits / 32)``, ``rms`` float16 ``(B, H, n)``. The rms is stored
    rather than the norm because it cannot overflow where the input did not. A code is the index of its level in
    ``levels`` as given, in any order. Rows of zeros decode to exact zeros. Rows whose bits do not fill whole words are
    padded with zero codes. With Lloyd-Max levels and a rotation this is TurboQuant (arXiv 2504.19874). ``fused``:
    scores of few query rows come from tables of the query (``PackedDots``).

    Four levels as two sign planes, through the 1-bit products of MLX 0.32.4, are right on the CPU, but scores take 1.4
    times as long as with decoded tiles and sums 3 times, and CUDA refuses them. So there is no such path.
    """

    def __init__(self, dim: int, levels: Sequence[float] | np.ndarray, bits: int, fused: bool = False) -> None:
        self.bits, self.dim = check_bits(bits), dim
        self.padded_dim = padded(dim, row_multiple(bits))
        self.layout = {"words": Axis(-2, 1), "rms": Axis(-1, 1)}
        table = np.asarray(levels, dtype=np.float32)
        self._dots, self._levels = PackedDots(table, bits, fused), level_array(table)
        order = np.argsort(table, kind="stable")
        if not np.isfinite(table).all():
            raise QuantizerConfigError("levels must be finite numbers")
        self._nearest = Nearest((table[order][1:] + table[order][:-1]) / 2, bits)
        self._order = None if (np.diff(order) == 1).all() else mx.array(order.astype(np.uint8))
        mx.eval(self._order)

    def encode(self, x: mx.array) -> Codes:
        x = x.astype(mx.float32)
        rms = mx.sqrt((x * x).mean(-1, keepdims=True))
        codes = self._nearest(x / mx.maximum(rms, 1e-30))
        if self._order is not None:
            codes = mx.take_along_axis(self._order, codes.reshape(-1), axis=0).reshape(x.shape)
        if self.padded_dim > self.dim:
            codes = mx.pad(codes, [(0, 0)] * (x.ndim - 1) + [(0, self.padded_dim - self.dim)])
        return {"words": pack(codes, self.bits), "rms": mx.minimum(rms[..., 0], F16_MAX).astype(mx.float16)}

    def _values(self, codes: Codes) -> mx.array:
        """Levels ``(B, H, n, padded_dim)`` in float32, without the rms."""
        return self._dots.values(codes["words"])

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        rows = self._values(codes) * codes["rms"].astype(mx.float32)[..., None]
        return cast(rows[..., : self.dim], dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        work = compute_dtype(q.dtype)
        query = q.astype(work)
        if self.padded_dim > self.dim:
            query = mx.pad(query, [(0, 0)] * (q.ndim - 1) + [(0, self.padded_dim - self.dim)])
        dots = self._dots(query, codes["words"])
        return (dots.astype(mx.float32) * codes["rms"].astype(mx.float32)[..., None, :]).astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        work = compute_dtype(p.dtype)
        weights = (p.astype(mx.float32) * codes["rms"].astype(mx.float32)[..., None, :]).astype(work)
        mixed = self.tiled_mix(weights, codes, lambda tile: self._values(tile).astype(work))
        return mixed[..., : self.dim].astype(p.dtype)

    def readable(self, codes: Codes) -> Readable | None:
        if self.dim % 8:
            return None
        return Readable("codebook", self.bits, self.dim, codes["words"], codes["rms"], table=self._levels)


def _search_tree(thresholds: np.ndarray) -> np.ndarray:
    """The sorted thresholds as a binary search tree in heap order; entry 0 is unused."""
    count = thresholds.size + 1
    tree = np.zeros(count, dtype=np.float32)
    for node in range(1, count):
        depth = node.bit_length() - 1
        tree[node] = thresholds[((2 * (node - (1 << depth)) + 1) * count >> (depth + 1)) - 1]
    return tree
