"""Outlier channels in a stream of their own: two codecs of different widths side by side.

The split of TurboQuant (arXiv 2504.19874) and QJL (arXiv 2406.03482): a few channels of every head are large in all
tokens, so they are found once and then coded apart.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import lcm

import mlx.core as mx

from .base import Axis, Codec, Codes, Symbols, cast

OUTLIERS, INLIERS = "out_", "in_"


class TwoStream(Codec):
    """``outlier`` codes the ``n_outliers`` channels with the largest mean magnitude, ``inlier`` the ``dim - n`` others.

    Each gets rows ``(B, H, n, its channels)`` in ascending order of the channels. They are found per sequence and head
    in the first ``fit_rows`` rows; of equals the lower channel counts. Fitted array: ``channels`` uint16
    ``(B, H, n_outliers)``. Codes: those of the parts under ``out_`` and ``in_``. The paper does not say how the
    channels are found [design].
    """

    def __init__(self, inlier: Codec, outlier: Codec, dim: int, n_outliers: int, fit_rows: int) -> None:
        assert not inlier.fit_rows and not outlier.fit_rows, "the parts must work without a fit"
        self.parts = {OUTLIERS: outlier, INLIERS: inlier}
        self.dim, self.n_outliers, self.fit_rows = dim, n_outliers, fit_rows
        self.block = lcm(inlier.block, outlier.block)
        self.layout = {
            prefix + name: Axis(axis, slots * self.block // codec.block)
            for prefix, codec in self.parts.items()
            for name, (axis, slots) in codec.layout.items()
        }
        self.symbols: Mapping[str, Symbols] = {
            prefix + name: coded for prefix, codec in self.parts.items() for name, coded in codec.symbols.items()
        }
        self._channels: mx.array | None = None

    def fit(self, x: mx.array) -> Codes:
        size = mx.abs(x.astype(mx.float32)).mean(axis=2)
        largest = mx.argsort(-size, axis=-1)[..., : self.n_outliers]
        return {"channels": mx.sort(largest, axis=-1).astype(mx.uint16)}

    def bind(self, fitted: Codes) -> TwoStream:
        """This codec with the channels of ``fit``."""
        bound = copy.copy(self)
        bound._channels = fitted["channels"]
        return bound

    def _order(self) -> mx.array:
        """Place to channel ``(B, H, D)``: outliers, then the others. Made anew when needed: held are only 2n bytes."""
        channels = self._channels
        assert channels is not None, "used before fit"
        every = mx.arange(self.dim, 2 * self.dim, dtype=mx.int32)
        every = mx.broadcast_to(every, (*channels.shape[:2], self.dim))
        outliers = channels.astype(mx.int32)
        return mx.argsort(mx.put_along_axis(every, outliers, outliers, axis=-1), axis=-1)

    def _split(self, x: mx.array) -> dict[str, mx.array]:
        """The channels of ``x`` ``(B, H, n, D)`` per part."""
        y = _take(x, self._order())
        return {OUTLIERS: y[..., : self.n_outliers], INLIERS: y[..., self.n_outliers :]}

    def encode(self, x: mx.array) -> Codes:
        streams = self._split(x)
        return {
            prefix + name: array
            for prefix, codec in self.parts.items()
            for name, array in codec.encode(streams[prefix]).items()
        }

    def _of(self, codes: Codes, prefix: str) -> Codes:
        return {name: codes[prefix + name] for name in self.parts[prefix].layout}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        rows = mx.concatenate([codec.decode(self._of(codes, prefix)) for prefix, codec in self.parts.items()], axis=-1)
        return cast(_take(rows, mx.argsort(self._order(), axis=-1)), dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        streams = self._split(q)
        outliers, inliers = (
            codec.scores(streams[prefix], self._of(codes, prefix)) for prefix, codec in self.parts.items()
        )
        return outliers + inliers


def _take(x: mx.array, order: mx.array) -> mx.array:
    """``x`` ``(B, H, n, D)`` with the channels of every head in ``order`` ``(B, H, D)``."""
    return mx.take_along_axis(x, mx.broadcast_to(order[:, :, None], x.shape), axis=-1)
