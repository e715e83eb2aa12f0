"""Three tiers of tokens: rows as they are, a third of their principal coordinates, or a sixteenth.

The tiers of AMC (Hu et al., arXiv 2607.10109) for rows of a cache. Axes are those of the head, largest first; a tier
keeps the first ``rank`` coordinates, symmetric and in groups, each with a float16 step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import floor

import mlx.core as mx

from .base import F16_MAX, Axis, Codes, GuidedCodec, cast, take_rows
from .basis import principal_axes, sampled
from .packing import pack, pack_bytes, padded, to_words, unpack

LOW, MID, HIGH = 0, 1, 2
MID_BITS, LOW_BITS, ID_BITS = 8, 4, 2
MID_SHARE, LOW_SHARE = 0.336, 0.0625  # of the coordinates


def tier_counts(n: int, high: float, mid: float) -> tuple[int, int]:
    """Tokens of ``n`` in the high and in the middle tier, for the shares of both; halves round up."""
    top = min(n, floor(n * high + 0.5 + 1e-9))
    return top, min(n - top, floor(n * mid + 0.5 + 1e-9))


def mid_rank(dim: int) -> int:
    """Coordinates that the middle tier keeps."""
    return max(1, round(MID_SHARE * dim))


def ranked(saliency: mx.array, counts: Sequence[int]) -> mx.array:
    """Tiers ``(..., n)`` uint8 of the most salient ``counts[0]`` tokens, the next ``counts[1]`` and the rest.

    Of equal tokens those that come first are more salient.
    """
    order = mx.argsort(mx.argsort(-saliency, axis=-1), axis=-1)
    return (order < counts[0]).astype(mx.uint8) + (order < counts[0] + counts[1]).astype(mx.uint8)


def magnitudes(x: mx.array) -> mx.array:
    """Mean size ``(B, H, n)`` of the numbers of a row, float32."""
    return mx.abs(x.astype(mx.float32)).mean(axis=-1)


class Coordinates:
    """The first ``rank`` numbers of rows, symmetric with ``bits``: ``code * step``, ``step = max|z| / Q`` per group.

    ``codes`` uint8 ``(B, H, n, ceil(rank * bits / 8))`` and ``steps`` float16 ``(B, H, n, groups)``.
    """

    def __init__(self, rank: int, bits: int, group: int) -> None:
        self.rank, self.bits, self.group = rank, bits, min(group, rank)
        self.groups, self._top = -(-rank // self.group), (1 << (bits - 1)) - 1

    def encode(self, z: mx.array) -> tuple[mx.array, mx.array]:
        z = self._grouped(z[..., : self.rank])
        steps = mx.minimum(mx.abs(z).max(axis=-1, keepdims=True) / self._top, F16_MAX).astype(mx.float16)
        codes = mx.round(z / mx.maximum(steps.astype(mx.float32), 2.0**-24))
        codes = (mx.clip(codes, -self._top, self._top) + self._top).astype(mx.uint8)
        return pack_bytes(codes.reshape(*z.shape[:-2], -1)[..., : self.rank], self.bits), steps[..., 0]

    def decode(self, codes: mx.array, steps: mx.array) -> mx.array:
        z = unpack(to_words(codes, self.bits), self.bits, self.rank).astype(mx.float32) - self._top
        z = self._grouped(z) * steps.astype(mx.float32)[..., None]
        return z.reshape(*z.shape[:-2], -1)[..., : self.rank]

    def _grouped(self, z: mx.array) -> mx.array:
        spare = self.groups * self.group - self.rank
        z = mx.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, spare)]) if spare else z
        return z.reshape(*z.shape[:-1], self.groups, self.group)


class RankTiers(GuidedCodec):
    """Rows by tier: float16 as they are, or the first coordinates on ``basis`` float32 ``(B, H, D, rank)``, fitted.

    The guide gives the tier of every row. ``segment`` tokens are sorted at a time, with room for as many high and
    middle ones as the shares say; every token may be a low one, so each has a low row, and room that is not needed
    stays empty. Without a segment all tokens are one block in which the shares hold exactly; it decodes by ``rows``.
    Codes: ``tiers`` uint32 with 2 bits per token; ``high`` float16 ``(B, H, m, D)``; ``mid`` and ``low`` with
    ``mid_steps`` and ``low_steps`` as ``Coordinates`` has them, in the order of the tokens.
    """

    def __init__(self, shares: tuple[float, float], group: int, *, dim: int, segment: int = 0, fit_rows: int) -> None:
        self.shares, self.segment, self.block, self.fit_rows = shares, segment, segment or 1, fit_rows
        self.dim = dim
        self.mid = Coordinates(mid_rank(dim), MID_BITS, group)
        self.low = Coordinates(max(1, round(LOW_SHARE * dim)), LOW_BITS, group)
        self._fitted: Codes = {}
        layout = {"tiers": Axis(-1, padded(segment, 16) // 16)}
        for name, size in zip(("high", "mid", "low"), self._sizes(segment), strict=True):
            if size:
                layout |= {name: Axis(2, size)} | ({} if name == "high" else {f"{name}_steps": Axis(2, size)})
        self.layout = layout

    def _sizes(self, n: int) -> tuple[int, int, int]:
        """Room for high, middle and low tokens among ``n`` that are sorted together."""
        high, mid = tier_counts(n, *self.shares)
        return high, mid, n if self.segment else n - high - mid

    # ------------------------------------------------------------------------------------------------------- fitting

    def fit(self, x: mx.array) -> Codes:
        # Row by row in memory: products of the same numbers in another order of memory round otherwise.
        return {"basis": mx.contiguous(principal_axes(sampled(x))[0][..., : self.mid.rank])}

    def bind(self, fitted: Codes) -> RankTiers:
        bound = copy.copy(self)
        bound._fitted, bound.fit_rows = fitted, 0
        return bound

    # --------------------------------------------------------------------------------------------------------- codes

    def encode(self, x: mx.array) -> Codes:
        saliency = magnitudes(x)
        groups = saliency.reshape(*saliency.shape[:2], -1, self.segment or saliency.shape[2])
        return self.encode_guided(x, ranked(groups, tier_counts(groups.shape[-1], *self.shares)).reshape(x.shape[:3]))

    def encode_guided(self, x: mx.array, guide: mx.array) -> Codes:
        b, h, n, _ = x.shape
        length = self.segment or n
        tiers = guide.reshape(b, h, n // length, length).astype(mx.uint8)
        codes: Codes = {"tiers": pack(mx.pad(tiers, [(0, 0)] * 3 + [(0, -length % 16)]), ID_BITS).reshape(b, h, -1)}
        x = x.astype(mx.float32)
        z = x @ self._fitted["basis"]
        place, first = mx.arange(length, dtype=mx.int32), mx.arange(0, n, length, dtype=mx.int32)[:, None]
        for name, tier, size in zip(("high", "mid", "low"), (HIGH, MID, LOW), self._sizes(length), strict=True):
            if not size:
                continue
            # Those of the tier in their order, then the others, whose rows nobody reads.
            others = 0 if name == "low" and self.segment else (tiers != tier).astype(mx.int32) * length
            order = mx.argsort(mx.broadcast_to(place + others, tiers.shape), axis=-1)[..., :size]
            rows = take_rows(x if name == "high" else z, (order + first).reshape(b, h, -1))
            if name == "high":
                codes["high"] = mx.clip(rows, -F16_MAX, F16_MAX).astype(mx.float16)
            else:
                codes[name], codes[f"{name}_steps"] = (self.mid if name == "mid" else self.low).encode(rows)
        return codes

    def _tiers(self, codes: Codes) -> mx.array:
        """Tiers ``(B, H, segments, n)``, n padded to whole words."""
        words = codes["tiers"]
        length = padded(self.segment, 16) or words.shape[-1] * 16
        return unpack(words, ID_BITS).reshape(*words.shape[:2], -1, length)[..., : self.segment or length]

    def _places(self, tiers: mx.array, tier: int) -> mx.array:
        """Which row of its tier and segment each token of ``tier`` has; nonsense for the others."""
        if tier == LOW and self.segment:
            return mx.broadcast_to(mx.arange(tiers.shape[-1], dtype=mx.int32), tiers.shape)
        return mx.cumsum((tiers == tier).astype(mx.int32), axis=-1) - 1

    def _held(self, codes: Codes, segments: int) -> list[tuple[str, int, int]]:
        """Names of the tiers that have rows, which they are, and how many rows a segment has."""
        names = (("high", HIGH), ("mid", MID), ("low", LOW))
        return [(name, tier, codes[name].shape[2] // segments) for name, tier in names if name in codes]

    def _coordinates(self, codes: Codes, name: str) -> mx.array:
        return (self.mid if name == "mid" else self.low).decode(codes[name], codes[f"{name}_steps"])

    def _axes(self, rank: int) -> mx.array:
        return self._fitted["basis"][..., :rank]

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        _, _, segments, length = self._tiers(codes).shape
        return self._rows(codes, 0, segments * length, dtype)

    def rows(self, codes: Codes, start: int, stop: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        return super().rows(codes, start, stop, dtype) if self.segment else self._rows(codes, start, stop, dtype)

    def _rows(self, codes: Codes, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
        tiers = self._tiers(codes)
        b, h, segments, _ = tiers.shape
        first, out = mx.arange(segments, dtype=mx.int32)[:, None], mx.zeros((b, h, stop - start, self.dim))
        for name, tier, size in self._held(codes, segments):
            place = mx.clip(self._places(tiers, tier), 0, size - 1) + first * size
            index = place.reshape(b, h, -1)[..., start:stop]
            if name == "high":
                rows = take_rows(codes["high"], index).astype(mx.float32)
            else:
                z = self._coordinates({k: take_rows(codes[k], index) for k in (name, f"{name}_steps")}, name)
                rows = z @ self._axes(z.shape[-1]).swapaxes(-1, -2)
            out = mx.where((tiers.reshape(b, h, -1)[..., start:stop] == tier)[..., None], rows, out)
        return cast(out, dtype)

    def _all_places(self, codes: Codes, tiers: mx.array) -> tuple[mx.array, int]:
        """Where every token's row is when the tiers of its segment lie one after another, and how many there are."""
        place, at = mx.zeros(tiers.shape, mx.int32), 0
        for _, tier, size in self._held(codes, tiers.shape[2]):
            # Of a block, padding may count beyond the low tier.
            place = mx.where(tiers == tier, mx.clip(self._places(tiers, tier), 0, size - 1) + at, place)
            at += size
        return place, at

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        tiers, rows = self._tiers(codes), q.shape[2]
        b, h, segments, length = tiers.shape
        wide, parts = q.astype(mx.float32), []
        turned = wide @ self._fitted["basis"]
        for name, _, size in self._held(codes, segments):
            if name == "high":
                part = wide @ codes["high"].astype(mx.float32).swapaxes(-1, -2)
            else:
                z = self._coordinates(codes, name)
                part = turned[..., : z.shape[-1]] @ z.swapaxes(-1, -2)
            parts.append(part.reshape(b, h, rows, segments, size))
        place = mx.broadcast_to(self._all_places(codes, tiers)[0][:, :, None], (b, h, rows, segments, length))
        found = mx.take_along_axis(mx.concatenate(parts, axis=-1), place, axis=-1)
        return found.reshape(b, h, rows, -1).astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        b, h, rows, n = p.shape
        tiers = self._tiers(codes)
        segments = tiers.shape[2]
        place, room = self._all_places(codes, tiers[..., : n // segments])
        weights = p.astype(mx.float32).reshape(b, h, rows, segments, -1)
        place = mx.broadcast_to(place[:, :, None], weights.shape)
        weights = mx.put_along_axis(mx.zeros((*weights.shape[:-1], room)), place, weights, axis=-1)
        out, first = mx.zeros((b, h, rows, self.dim)), 0
        for name, _, size in self._held(codes, segments):
            mine, first = weights[..., first : first + size].reshape(b, h, rows, -1), first + size
            if name == "high":
                out = out + mine @ codes["high"].astype(mx.float32)
            else:
                z = self._coordinates(codes, name)
                out = out + (mine @ z) @ self._axes(z.shape[-1]).swapaxes(-1, -2)
        return out.astype(p.dtype)
