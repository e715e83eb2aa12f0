"""Latent channels of the keys of a head, quantised along tokens with bits that fall from the first to the last.

SVDq (Hong et al., arXiv 2502.15304).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import lcm

import mlx.core as mx
import numpy as np

from .affine import ChannelAffine
from .base import Axis, Codec, Codes, cast
from .basis import principal_axes, sampled


def scheduled(schedule: Sequence[int], rank: int) -> np.ndarray:
    """Bits ``(rank,)``: slices of equal size, the first ones longer by one where they do not come out even."""
    slices = np.array_split(np.arange(rank), len(schedule))
    return np.repeat(np.array(schedule, np.uint8), [s.size for s in slices])


class LatentAffine(Codec):
    """``x ~ mean + z basis^T``; a latent channel has min/max groups of ``group`` tokens, means at one bit.

    Fitted arrays: ``mean`` float32 ``(B, H, 1, D)``, ``basis`` float32 ``(B, H, D, k)`` of the ``k`` latent channels
    that have bits, those with more first, and ``bits`` uint8 ``(B, H, rank)`` in the order of the energies, the
    same in every head. Without a ``rank`` it is the smallest that keeps the share ``energy`` of the squared singular
    values of every head, which waits for the numbers, once. Codes: those of ``ChannelAffine`` for every width,
    ``w<bits>_words`` and so on.
    """

    def __init__(self, schedule: Sequence[int], group: int, *, rank: int | None, energy: float, fit_rows: int) -> None:
        self.fit_rows, self._rank, self._energy = fit_rows, rank, energy
        self._schedule = tuple(schedule)
        self._widths = {b: ChannelAffine(b, group) for b in sorted({*schedule}, reverse=True) if b}
        self.block = lcm(*(codec.block for codec in self._widths.values()))
        self.layout = {}
        self._fitted: Codes = {}
        self._sections: list[tuple[ChannelAffine, int]] = []

    def fit(self, x: mx.array) -> Codes:
        x = sampled(x)
        mean = x.mean(axis=2, keepdims=True)
        axes, energy = principal_axes(x - mean)
        rank = self._rank
        if rank is None:
            held = mx.cumsum(energy, axis=-1)
            short = (held < self._energy * energy.sum(-1, keepdims=True) * (1 - 1e-6)).sum(-1)
            rank = min(int(np.array(short.max())) + 1, x.shape[-1])
        bits = scheduled(self._schedule, rank)
        order = np.argsort(-bits.astype(np.int32), kind="stable")[: np.count_nonzero(bits)]
        # Row by row in memory: products of the same numbers in another order of memory round otherwise.
        basis = mx.contiguous(mx.take(axes, mx.array(order), axis=-1))
        every = mx.contiguous(mx.broadcast_to(mx.array(bits), (*x.shape[:2], rank)))
        return {"mean": mean, "basis": basis, "bits": every}

    def bind(self, fitted: Codes) -> LatentAffine:
        """This codec with the basis of ``fit``; reads the bits, once."""
        bound, bits = copy.copy(self), np.array(fitted["bits"][0, 0])
        bound._fitted, bound.fit_rows = fitted, 0
        bound._sections = [(c, n) for width, c in self._widths.items() if (n := int((bits == width).sum()))]
        bound.layout = {
            f"w{codec.bits}_{name}": Axis(axis, slots * self.block // codec.block)
            for codec, _ in bound._sections
            for name, (axis, slots) in codec.layout.items()
        }
        return bound

    def _split(self, z: mx.array) -> list[tuple[ChannelAffine, mx.array]]:
        """Columns of ``z`` ``(B, H, n, k)`` by width."""
        out, at = [], 0
        for codec, n in self._sections:
            out.append((codec, z[..., at : at + n]))
            at += n
        return out

    def encode(self, x: mx.array) -> Codes:
        z = (x.astype(mx.float32) - self._fitted["mean"]) @ self._fitted["basis"]
        return {
            f"w{codec.bits}_{name}": array
            for codec, part in self._split(z)
            for name, array in codec.encode(part).items()
        }

    def _of(self, codes: Codes, codec: ChannelAffine) -> Codes:
        return {name: codes[f"w{codec.bits}_{name}"] for name in codec.layout}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        z = mx.concatenate([codec.decode(self._of(codes, codec)) for codec, _ in self._sections], axis=-1)
        return cast(z @ self._fitted["basis"].swapaxes(-1, -2) + self._fitted["mean"], dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        wide = q.astype(mx.float32)
        out = wide @ self._fitted["mean"].swapaxes(-1, -2)
        for codec, part in self._split(wide @ self._fitted["basis"]):
            out = out + codec.scores(mx.contiguous(part), self._of(codes, codec))  # CUDA takes no views with gaps
        return out.astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        wide = p.astype(mx.float32)
        z = mx.concatenate([codec.mix(wide, self._of(codes, codec)) for codec, _ in self._sections], axis=-1)
        return (z @ self._fitted["basis"].swapaxes(-1, -2) + wide.sum(-1, keepdims=True) * self._fitted["mean"]).astype(
            p.dtype
        )
