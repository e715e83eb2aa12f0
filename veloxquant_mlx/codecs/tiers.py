"""Two tiers of tokens: those that a guide finds salient get more bits than the rest.

The layouts of ZipCache (He et al., NeurIPS 2024, arXiv 2405.14256). Tokens are taken in segments; the ``fraction`` of
largest saliency in a segment, rounded up, is the high tier of that head, of equal ones those that come first. Tokens of
a tier lie together in the order of their positions, and one bit per token says which tier it is in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import ceil

import mlx.core as mx

from .affine import NATIVE_GROUPS, ChannelAffine, TokenAffine
from .base import F16_MAX, Axis, Codes, GuidedCodec, cast, take_rows
from .packing import pack, padded, unpack

NAMES = ("high", "low")


def tier_sizes(n: int, fraction: float) -> tuple[int, int]:
    """Tokens of ``n`` in the high and in the low tier: ``ceil(fraction * n)`` and the rest."""
    high = ceil(fraction * n - 1e-9)  # 0.3 * 10 is a little above 3
    return high, n - high


def segment_length(fraction: float, bits: Sequence[int], group: int, choices: Sequence[int] = (96, 128, 160)) -> int:
    """The choice whose two tiers, padded to whole groups and words, grow least; of equal ones the first."""

    def grown(n: int) -> float:
        sizes = zip(tier_sizes(n, fraction), bits, strict=True)
        return sum(padded(size, _channels(b, group, size).block) for size, b in sizes if size) / n

    return min(choices, key=grown)


def _channels(bits: int, group: int, n: int) -> ChannelAffine:
    """The codec of one key tier of ``n`` tokens; a group is no longer than the tier."""
    return ChannelAffine(bits, min(group, padded(n, 32)))


class _Tiers(GuidedCodec):
    """What keys and values have in common. ``segment`` tokens are sorted at a time; 0: all that come in one call.

    ``tiers`` in the codes is uint32 ``(B, H, segments * ceil(n / 32))``, one bit per token, set in the high tier.
    A codec without ``segment`` makes one block of any length; it decodes by ``rows`` only.
    """

    def __init__(self, bits: tuple[int, int], fraction: float, segment: int) -> None:
        self.bits, self.fraction, self.segment = bits, fraction, segment
        self.block = segment or 1
        self.layout = {"tiers": Axis(-1, padded(segment, 32) // 32)}

    def encode(self, x: mx.array) -> Codes:
        return self.encode_guided(x, mx.zeros(x.shape[:3]))

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return self._rows(codes, 0, codes["tiers"].shape[-1] * 32, dtype)

    def rows(self, codes: Codes, start: int, stop: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        return super().rows(codes, start, stop, dtype) if self.segment else self._rows(codes, start, stop, dtype)

    def _rows(self, codes: Codes, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
        """Tokens ``start`` to ``stop``, picked out of both tiers."""
        inside = self._inside(codes)
        b, h, segments, length = inside.shape
        high = mx.cumsum(inside.astype(mx.int32), axis=-1) - 1
        low = mx.arange(length, dtype=mx.int32) - 1 - high
        first = mx.arange(segments, dtype=mx.int32)[:, None]
        inside = inside.reshape(b, h, -1)[..., start:stop]
        parts = []
        for name, place in zip(NAMES, (high, low), strict=True):
            if f"{name}_words" not in codes:
                continue
            size = self._size(codes, name, segments)
            # Of a token that is in the other tier, some row that is there.
            index = (mx.clip(place, 0, size - 1) + first * size).reshape(b, h, -1)[..., start:stop]
            parts.append(self._pick(codes, name, index))
        out = parts[0] if len(parts) == 1 else mx.where(inside[..., None], *parts)
        return cast(self._finish(out, codes, start, stop), dtype)

    def _finish(self, rows: mx.array, codes: Codes, start: int, stop: int) -> mx.array:
        return rows

    @abstractmethod
    def _size(self, codes: Codes, name: str, segments: int) -> int:
        """Tokens of one tier in a segment, padding included."""

    @abstractmethod
    def _pick(self, codes: Codes, name: str, index: mx.array) -> mx.array:
        """Float32 rows ``(B, H, m, D)`` of one tier at ``index`` ``(B, H, m)``."""

    def _split(self, saliency: mx.array) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        """The tiers' bits, and which tokens ``(B, H, segments, n)`` of its segment each tier holds."""
        b, h, n = saliency.shape
        length = self.segment or n
        # Not a number would fit in neither tier, and places would end beyond both.
        x = mx.nan_to_num(saliency.astype(mx.float32)).reshape(b, h, -1, length)
        high, _ = tier_sizes(length, self.fraction)
        if high in (0, length):
            inside = mx.full(x.shape, high > 0)
        else:
            least = mx.sort(x, axis=-1)[..., length - high, None]
            above, equal = x > least, x == least
            room = high - above.sum(axis=-1, keepdims=True)
            inside = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
        place = _places(inside, high)
        order = mx.put_along_axis(
            mx.zeros(place.shape, mx.int32), place, mx.broadcast_to(mx.arange(length, dtype=mx.int32), place.shape), -1
        )
        spare = padded(length, 32) - length
        bits = mx.pad(inside.astype(mx.uint8), [(0, 0)] * 3 + [(0, spare)])
        return pack(bits, 1).reshape(b, h, -1), (order[..., :high], order[..., high:])

    def _inside(self, codes: Codes) -> mx.array:
        """Boolean ``(B, H, segments, n)``, True in the high tier; n is padded to whole words."""
        words = codes["tiers"]
        length = padded(self.segment, 32) or words.shape[-1] * 32
        return unpack(words, 1).reshape(*words.shape[:2], -1, length).astype(mx.bool_)


def _places(inside: mx.array, high: int) -> mx.array:
    """Where each token ``(..., n)`` lies when the high tier, with room for ``high`` tokens, goes before the low one."""
    count = mx.cumsum(inside.astype(mx.int32), axis=-1)
    return mx.where(inside, count - 1, mx.arange(inside.shape[-1], dtype=mx.int32) + high - count)


def _gather(x: mx.array, order: mx.array) -> mx.array:
    """Rows ``(B, H, segments * m, D)`` of ``x`` ``(B, H, n, D)`` at ``order`` ``(B, H, segments, m)`` of segments."""
    b, h, segments, m = order.shape
    first = mx.arange(segments, dtype=mx.int32)[:, None] * (x.shape[2] // segments)
    return take_rows(x, (order + first).reshape(b, h, segments * m))


class TieredKeys(_Tiers):
    """Both tiers as ``ChannelAffine`` has them, in groups of ``group`` tokens of one tier of one segment.

    A tier is padded to whole groups and words by repeating its last token; a group longer than the tier is shortened
    to it. Codes: ``high_words`` and ``low_words`` uint32 ``(B, H, D, ...)`` with ``_scales`` and ``_biases`` float16.
    """

    def __init__(self, bits: tuple[int, int], fraction: float, group: int, segment: int = 0) -> None:
        super().__init__(bits, fraction, segment)
        self.group = group
        self._whole = [ChannelAffine(b, group) for b in bits]
        layout = dict(self.layout)
        for name, b, size in zip(NAMES, bits, tier_sizes(segment, fraction), strict=True):
            if size:
                codec = _channels(b, group, size)
                room = padded(size, codec.block)
                params = Axis(-1, room // codec.group)
                layout |= {f"{name}_words": Axis(-1, room * b // 32)}
                layout |= {f"{name}_scales": params, f"{name}_biases": params}
        self.layout = layout

    def encode_guided(self, x: mx.array, guide: mx.array) -> Codes:
        bits, orders = self._split(guide)
        out = {"tiers": bits}
        for name, b, order in zip(NAMES, self.bits, orders, strict=True):
            size = order.shape[-1]
            if size:
                codec = _channels(b, self.group, size)
                spare = padded(size, codec.block) - size
                order = mx.pad(order, [(0, 0)] * 3 + [(0, spare)], mode="edge") if spare else order
                out |= {f"{name}_{part}": a for part, a in codec.encode(_gather(x, order)).items()}
        return out

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        inside, parts, high = self._inside(codes), [], 0
        b, h, segments, length = inside.shape
        rows = q.shape[2]
        for name in NAMES:
            if f"{name}_words" in codes:
                tier = {part: codes[f"{name}_{part}"] for part in ("words", "scales", "biases")}
                parts.append(self._codec(codes, name).scores(q, tier).reshape(b, h, rows, segments, -1))
                high = parts[-1].shape[-1] if name == NAMES[0] else high
        found = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        # Bits beyond the last token of a block point beyond the low tier.
        place = mx.minimum(_places(inside, high), found.shape[-1] - 1)[:, :, None]
        place = mx.broadcast_to(place, (b, h, rows, segments, length))
        return mx.take_along_axis(found, place, axis=-1).reshape(b, h, rows, segments * length)

    def _codec(self, codes: Codes, name: str) -> ChannelAffine:
        words, scales = codes[f"{name}_words"], codes[f"{name}_scales"]
        whole = self._whole[NAMES.index(name)]
        group = words.shape[-1] * 32 // whole.bits // scales.shape[-1]
        return whole if group == whole.group else ChannelAffine(whole.bits, group)

    def _size(self, codes: Codes, name: str, segments: int) -> int:
        return codes[f"{name}_words"].shape[-1] * 32 // self.bits[NAMES.index(name)] // segments

    def _pick(self, codes: Codes, name: str, index: mx.array) -> mx.array:
        codec, words = self._codec(codes, name), codes[f"{name}_words"]
        bits, (b, h, dim, n_words) = codec.bits, words.shape

        def at(array: mx.array, where: mx.array) -> mx.array:
            return mx.take_along_axis(array, mx.broadcast_to(where[:, :, None], (b, h, dim, where.shape[-1])), axis=-1)

        word, shift = index * bits // 32, ((index * bits) % 32).astype(mx.uint32)[:, :, None]
        code = at(words, word) >> shift
        if 32 % bits:  # the rest of the code is in the next word; two shifts, as one by 32 is not defined
            code = code | ((at(words, mx.minimum(word + 1, n_words - 1)) << 1) << (31 - shift))
        code = (code & ((1 << bits) - 1)).astype(mx.float32)
        scales, biases = (at(codes[f"{name}_{part}"], index // codec.group) for part in ("scales", "biases"))
        return (code * scales.astype(mx.float32) + biases.astype(mx.float32)).swapaxes(-1, -2)


class TieredValues(_Tiers):
    """Channels divided by the root of their largest ``|x|`` in the segment, then each token in one group of its own.

    The channel-separable tokenwise quantisation of ZipCache. Codes: ``high_words`` and ``low_words`` uint32
    ``(B, H, tokens of the tier, padded_dim * bits / 32)`` with ``_scales`` and ``_biases`` float16
    ``(B, H, tokens of the tier, 1)``, and ``channels`` float16 ``(B, H, segments, D)``.
    """

    def __init__(self, bits: tuple[int, int], fraction: float, segment: int = 0, *, dim: int) -> None:
        super().__init__(bits, fraction, segment)
        row = padded(dim, 32)
        self.dim, self._tiers = dim, [TokenAffine(b, row, dim=dim) for b in bits]
        # Products read a row as groups of a size that MLX knows, all with the row's parameters.
        native = max(g for g in NATIVE_GROUPS if row % g == 0)
        self._parts, self._products = row // native, [TokenAffine(b, native, dim=dim) for b in bits]
        layout = {**self.layout, "channels": Axis(2, 1)}
        for name, size in zip(NAMES, tier_sizes(segment, fraction), strict=True):
            if size:
                layout |= {f"{name}_{part}": Axis(2, size) for part in ("words", "scales", "biases")}
        self.layout = layout

    def encode_guided(self, x: mx.array, guide: mx.array) -> Codes:
        bits, orders = self._split(guide)
        b, h, n, dim = x.shape
        x = mx.clip(x.astype(mx.float32), -F16_MAX, F16_MAX).reshape(b, h, -1, self.segment or n, dim)
        channels = mx.sqrt(mx.abs(x).max(axis=3)).astype(mx.float16)
        channels = mx.where(channels > 0, channels, 1.0)
        x = (x / channels.astype(mx.float32)[:, :, :, None]).reshape(b, h, n, dim)
        out = {"tiers": bits, "channels": channels.astype(mx.float16)}
        for name, codec, order in zip(NAMES, self._tiers, orders, strict=True):
            if order.shape[-1]:
                out |= {f"{name}_{part}": a for part, a in codec.encode(_gather(x, order)).items()}
        return out

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        b, h, rows, n = p.shape
        segments = codes["channels"].shape[2]
        sizes = [self._size(codes, name, segments) if f"{name}_words" in codes else 0 for name in NAMES]
        p = p.reshape(b, h, rows, segments, n // segments)
        # Of spare segments no bit is set, and places would end beyond both tiers; the weights there are zeros.
        place = mx.minimum(_places(self._inside(codes)[..., : n // segments], sizes[0]), sum(sizes) - 1)[:, :, None]
        p = mx.put_along_axis(mx.zeros_like(p), mx.broadcast_to(place, p.shape), p, axis=-1)
        p = p.swapaxes(2, 3).reshape(b, h * segments, rows, -1)
        out, first = mx.zeros((), mx.float32), 0
        for name, codec, size in zip(NAMES, self._products, sizes, strict=True):
            if not size:
                continue
            tier = {"words": codes[f"{name}_words"]}
            tier |= {part: mx.repeat(codes[f"{name}_{part}"], self._parts, -1) for part in ("scales", "biases")}
            tier = {part: a.reshape(b, h * segments, size, -1) for part, a in tier.items()}
            out, first = out + codec.mix(p[..., first : first + size], tier).astype(mx.float32), first + size
        channels = codes["channels"].astype(mx.float32)[:, :, :, None]
        return (out.reshape(b, h, segments, rows, -1) * channels).sum(axis=2).astype(p.dtype)

    def _size(self, codes: Codes, name: str, segments: int) -> int:
        return codes[f"{name}_words"].shape[2] // segments

    def _pick(self, codes: Codes, name: str, index: mx.array) -> mx.array:
        codec = self._tiers[NAMES.index(name)]
        tier = {part: take_rows(codes[f"{name}_{part}"], index) for part in ("words", "scales", "biases")}
        return codec.decode(tier)

    def _finish(self, rows: mx.array, codes: Codes, start: int, stop: int) -> mx.array:
        channels = codes["channels"].astype(mx.float32)
        if not self.segment:
            return rows * channels
        b, h, segments, dim = channels.shape
        return (rows.reshape(b, h, segments, -1, dim) * channels[:, :, :, None]).reshape(rows.shape)
