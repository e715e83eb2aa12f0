"""Sign sketches of keys whose largest channels are sketched apart, found anew in every group of tokens (QJL).

Paper: Zandieh, Daliri, Han, arXiv 2406.03482. The variance of a sketch grows with the norm of the key, so that one
dominant channel poisons the scores of queries that do not look at it.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .base import F16_MAX, TILE, Axis, Codec, Codes, after, cast, compute_dtype
from .packing import lookup, lookup_table, pack, padded
from .sketch import sketch_constant

GROUP = 32  # tokens that share their outlier channels
SIGNS = np.array([-1.0, 1.0], dtype=np.float32)


class SplitSketch(Codec):
    """Signs of ``matrix`` ``(m, D)`` times the inlier channels, and of its first ``m_out`` rows times the outliers.

    Outliers are the ``n_outliers`` channels with the largest norm over ``GROUP`` tokens of a head; of equals the lower
    channel counts. Codes: ``signs`` and ``out_signs`` uint32 ``(B, H, n, padded m / 32)``, ``sizes`` and ``out_sizes``
    float16 ``(B, H, n)``, the rms of each part as if it had all D channels, and ``channels`` ``(B, H, n / 32,
    n_outliers)``, uint8 up to 256 channels and uint16 above. Both parts of a score are unbiased over orthogonal
    matrices, as those of ``SignSketch``; the query meets each part with the channels of that part alone.
    """

    block = GROUP

    def __init__(self, matrix: mx.array, n_outliers: int, m_out: int) -> None:
        self.matrix, self.n_outliers, self.m_out = matrix, n_outliers, m_out
        self.m, self.dim = matrix.shape
        assert 0 < n_outliers < self.dim and 0 < m_out <= self.m
        norm = sketch_constant(self.dim) * self.dim**0.5  # rms instead of norm
        self.weights = norm / self.m, norm / m_out
        row, group = Axis(2, GROUP), Axis(2, 1)
        self.layout = {"signs": row, "sizes": row, "out_signs": row, "out_sizes": row, "channels": group}
        self._table = lookup_table(SIGNS, 1)

    def encode(self, x: mx.array) -> Codes:
        x = x.astype(mx.float32)
        groups = self._grouped(x)
        sizes = mx.square(groups / mx.maximum(mx.abs(groups).max((-1, -2), keepdims=True), 1e-30)).sum(-2)
        channels = mx.sort(mx.argsort(-sizes, axis=-1)[..., : self.n_outliers], axis=-1)
        inside = self._inliers(channels)
        inliers = (groups * inside).reshape(x.shape)
        outliers = (groups * (1 - inside)).reshape(x.shape)
        return {
            "signs": self._signs(inliers, self.matrix),
            "sizes": _rms(inliers),
            "out_signs": self._signs(outliers, self.matrix[: self.m_out]),
            "out_sizes": _rms(outliers),
            "channels": channels.astype(mx.uint8 if self.dim <= 256 else mx.uint16),
        }

    def _grouped(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, GROUP, x.shape[-1])

    def _inliers(self, channels: mx.array) -> mx.array:
        """1 for inlier channels, 0 for outliers: ``(B, H, groups, 1, D)``."""
        ones = mx.ones((*channels.shape[:3], self.dim))
        return mx.put_along_axis(ones, channels.astype(mx.uint32), mx.array(0.0), axis=-1)[..., None, :]

    def _signs(self, x: mx.array, matrix: mx.array) -> mx.array:
        positive = x @ matrix.T >= 0
        spare = padded(len(matrix), 32) - len(matrix)
        return pack(mx.pad(positive, [(0, 0)] * 3 + [(0, spare)]) if spare else positive, 1)

    def _parts(self, codes: Codes) -> tuple[mx.array, mx.array]:
        """Signs as numbers ``(B, H, groups, 32, m)`` of the inliers and ``(..., m_out)`` of the outliers."""
        signs = lookup(codes["signs"], 1, self._table)[..., : self.m]
        return self._grouped(signs), self._grouped(lookup(codes["out_signs"], 1, self._table)[..., : self.m_out])

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        inside, (signs, out_signs) = self._inliers(codes["channels"]), self._parts(codes)
        sizes, out_sizes = (
            self._grouped(codes[name].astype(mx.float32)[..., None]) * weight
            for name, weight in zip(("sizes", "out_sizes"), self.weights, strict=True)
        )
        rows = signs @ self.matrix * inside * sizes
        rows = rows + out_signs @ self.matrix[: self.m_out] * (1 - inside) * out_sizes
        return cast(rows.reshape(*rows.shape[:2], -1, self.dim), dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        work = compute_dtype(q.dtype)
        wide = q.astype(mx.float32)
        projected = (wide @ self.matrix.T)[:, :, None]
        parts: list[mx.array] = []
        for tile in self.tiles(codes, TILE):
            tile = after(tile, parts[-1:])
            channels = tile["channels"].astype(mx.uint32)
            index = mx.broadcast_to(channels[..., None, :], (*channels.shape[:3], q.shape[2], self.n_outliers))
            own = mx.take_along_axis(wide[:, :, None], index, axis=-1)
            # what the outlier channels add to the projected query, per group: all that the two parts differ in
            share = own @ mx.take(self.matrix.T, channels, axis=0)
            halves = (projected - share, share[..., : self.m_out])
            total = mx.array(0.0)
            for query, signs, size, weight in zip(
                halves, self._parts(tile), ("sizes", "out_sizes"), self.weights, strict=True
            ):
                dots = (query * weight).astype(work) @ signs.astype(work).swapaxes(-1, -2)
                total = total + dots.astype(mx.float32) * self._grouped(
                    tile[size].astype(mx.float32)[..., None]
                ).swapaxes(-1, -2)
            parts.append(total.swapaxes(2, 3).reshape(*q.shape[:3], -1).astype(q.dtype))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _rms(x: mx.array) -> mx.array:
    return mx.minimum(mx.sqrt((x * x).mean(-1)), F16_MAX).astype(mx.float16)
