"""Groups of channels that are alike, of any size: outlier channels come into groups of their own.

The reordering of SKVQ (Duanmu et al., COLM 2024, arXiv 2405.06219), whose official code clusters channels by their low
and high ends in a text and lets each cluster be a group.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx

from .base import F16_MAX, Codec, Codes, cast
from .clipped import ALPHAS, ROWS, ClippedToken
from .packing import pack

SWEEPS = 10  # of Lloyd's algorithm; five find the same on keys of SmolLM2 and Gemma 3


class ClusteredToken(ClippedToken):
    """``ClippedToken`` whose groups are found in the first ``fit_rows`` rows.

    There are as many groups as there would be of ``group`` channels, but their sizes differ: equal ones put the
    channels of a large mean together with small ones, which then round to nothing. Channels stay in order. Fitted
    array: ``groups`` uint16 ``(B, H, D)``, the group of every channel. Decoded tile by tile: no native product has
    groups of several sizes.
    """

    def __init__(
        self,
        bits: int,
        group: int = 32,
        *,
        dim: int,
        fit_rows: int,
        alphas: Sequence[float] = ALPHAS,
        fp8: bool = True,
    ) -> None:
        super().__init__(bits, group, dim=dim, alphas=alphas, fp8=fp8)
        self.fit_rows = fit_rows
        self.count = self.padded_dim // self.group
        self._groups: mx.array | None = None

    def fit(self, x: mx.array) -> Codes:
        """The partition of channels with the least squared range over ``x`` ``(B, H, N, D)``, one per head.

        Equal groups compete (channels as they came, or sorted by low end, high end, middle or range), and clusters of
        the points (low end, high end) that Lloyd's algorithm makes of each of them and of points far apart.
        """
        x = mx.clip(x.astype(mx.float32), -F16_MAX, F16_MAX)
        low, high = x.min(axis=2), x.max(axis=2)
        points = mx.stack([low, high], axis=-1)
        orders = (mx.argsort(key, axis=-1) for key in (low, high, low + high, high - low))
        places = [mx.broadcast_to(mx.arange(self.dim), low.shape), *(mx.argsort(order, axis=-1) for order in orders)]
        starts = mx.stack([*(place // self.group for place in places), self._apart(points)]).astype(mx.uint32)
        labels = [*starts, *self._lloyd(points, starts)]
        best = mx.argmin(mx.stack([self._cost(x, some) for some in labels]), axis=0)
        found = mx.take_along_axis(mx.stack(labels), best[None, :, :, None], axis=0)[0]
        return {"groups": found.astype(mx.uint16)}

    def _apart(self, points: mx.array) -> mx.array:
        """Each point ``(B, H, D, 2)`` by the nearest of ``count`` points that are chosen far from one another."""
        middle = mx.square(points - points.mean(axis=2, keepdims=True)).sum(-1)
        distances: list[mx.array] = []
        far = -middle
        for _ in range(self.count):
            at = mx.argmax(far, axis=-1, keepdims=True)
            centre = mx.take_along_axis(points, at[..., None], axis=2)
            distances.append(mx.square(points - centre).sum(-1))
            far = distances[-1] if len(distances) == 1 else mx.minimum(far, distances[-1])
        return mx.argmin(mx.stack(distances, axis=-1), axis=-1)

    def _lloyd(self, points: mx.array, labels: mx.array) -> mx.array:
        """``labels`` ``(C, B, H, D)`` after sweeps of Lloyd's algorithm. A cluster that runs empty stays empty."""
        for _ in range(SWEEPS):
            inside = labels[..., None, :] == mx.arange(self.count)[:, None]
            size = inside.sum(axis=-1)[..., None]
            centres = inside.astype(mx.float32) @ points / mx.maximum(size, 1)
            distance = mx.square(points[..., None, :] - centres[..., None, :, :]).sum(-1)
            labels = mx.argmin(mx.where(size.swapaxes(-1, -2) > 0, distance, mx.inf), axis=-1)
        return labels

    def _cost(self, x: mx.array, labels: mx.array) -> mx.array:
        """Squared range of the groups, summed over channels and rows, ``(B, H)``."""
        inside = _inside(labels, self.count)
        wide = x[..., None, :]
        span = mx.where(inside, wide, -mx.inf).max(-1) - mx.where(inside, wide, mx.inf).min(-1)
        size = inside.sum(-1)
        return (mx.where(size > 0, mx.square(span), 0.0) * size).sum((2, 3))

    def bind(self, fitted: Codes) -> ClusteredToken:
        """This codec with the groups of ``fit``."""
        bound = copy.copy(self)
        bound._groups = fitted["groups"]
        return bound

    def encode(self, x: mx.array) -> Codes:
        rows = max(1, ROWS * 8 // self.count)  # a copy of them per factor and group
        parts = [self._encoded(x[:, :, i : i + rows].astype(mx.float32)) for i in range(0, x.shape[2], rows)]
        return parts[0] if len(parts) == 1 else {n: mx.concatenate([p[n] for p in parts], axis=2) for n in parts[0]}

    def _encoded(self, x: mx.array) -> Codes:
        assert self._groups is not None, "encode before fit"
        inside = _inside(self._groups, self.count)
        sums = inside[:, :, 0].swapaxes(-1, -2).astype(mx.float32)

        def error(step: mx.array, bias: mx.array) -> mx.array:
            step, bias = self._spread(step), self._spread(bias)
            return mx.square(self._nearest(x, step, bias) * step + bias - x) @ sums

        scales, biases = self._chosen(*self._ends_of(x, inside), error)
        step, bias = (self._spread(p) for p in self._wide(scales, biases))
        codes = self._pad(self._nearest(x, step, bias), mode="constant")
        return {"words": pack(codes.astype(mx.uint8), self.bits), "scales": scales, "biases": biases}

    def _ends_of(self, x: mx.array, inside: mx.array) -> tuple[mx.array, mx.array]:
        """As ``_ends``, of all groups of ``x`` ``(B, H, n, D)``: ``(B, H, n, count)``; zero for an empty one."""
        if self.bits > 1:
            wide, some = x[..., None, :], inside.any(-1)
            low, high = mx.where(inside, wide, mx.inf).min(-1), mx.where(inside, wide, -mx.inf).max(-1)
            return mx.where(some, low, 0.0), mx.where(some, mx.minimum(high, F16_MAX), 0.0)
        wide = mx.clip(x, -F16_MAX, F16_MAX)[..., None, :]
        size = inside.sum(-1)
        mean = mx.where(inside, wide, 0.0).sum(-1) / mx.maximum(size, 1)
        above = inside & (wide > mean[..., None])
        count = above.sum(-1)
        high = mx.where(above, wide, 0.0).sum(-1) / mx.maximum(count, 1)
        low = mx.where(inside & ~above, wide, 0.0).sum(-1) / mx.maximum(size - count, 1)
        return low, mx.where(count > 0, mx.minimum(high, low + F16_MAX), low)

    def _spread(self, p: mx.array) -> mx.array:
        """Numbers per group ``(..., n, count)`` as numbers per channel ``(..., n, D)``."""
        assert self._groups is not None
        return mx.take_along_axis(p, mx.broadcast_to(self._groups[:, :, None], (*p.shape[:-1], self.dim)), axis=-1)

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        step, bias = (self._spread(p) for p in self._wide(codes["scales"], codes["biases"]))
        return cast(self._levels(codes)[..., : self.dim] * step + bias, dtype)

    scores = Codec.scores
    mix = Codec.mix
    readable = Codec.readable


def _inside(labels: mx.array, count: int) -> mx.array:
    """Which channel is in which group, ``(B, H, 1, count, D)``, of ``labels`` ``(B, H, D)``."""
    return labels[:, :, None, None] == mx.arange(count)[:, None]
