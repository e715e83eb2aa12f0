"""Affine codes whose number of bits differs from head to head and from block to block, at a fixed sum over the heads.

Bits are data, and a matrix product must know its width when it is built: every head has a low plane of the fewest
bits, and what a head has beyond them lies in planes of ``unit`` bits, which all heads share. Since the sum is fixed,
so is their number, and so are all shapes. A code is ``low plane + 2**least * (plane 0 + 2**unit * plane 1 + ...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import mlx.core as mx

from ..core.exceptions import QuantizerConfigError
from ..core.types import is_int
from .affine import ChannelAffine, TokenAffine
from .base import Axis, Codes, GuidedCodec, after, cast, compute_dtype
from .packing import lookup, pack, padded, row_multiple


def unit_bits(choices: Sequence[int]) -> int:
    """Bits of one shared plane: the greatest step that leads from the fewest to all other choices; 0 without others."""
    return gcd(*(b - choices[0] for b in choices))


def shared_planes(choices: Sequence[int], target: float, heads: int) -> int:
    """Planes of ``unit_bits`` for ``heads`` heads of ``target`` bits on average, rounded down."""
    unit = unit_bits(choices)
    return int(heads * (target - choices[0]) / unit + 1e-9) if unit else 0


def block_multiple(choices: Sequence[int], group: int) -> int:
    """A block must be a multiple of this many tokens: whole groups, and whole words in all planes."""
    unit = unit_bits(choices)
    return padded(group, row_multiple(choices[0]), row_multiple(unit) if unit else 1)


def spread(words: mx.array) -> mx.array:
    """Words ``(..., 2 W)`` of 2-bit codes for the words ``(..., W)`` of 1-bit codes: MLX multiplies no single bits."""
    x = mx.stack([words & 0xFFFF, words >> 16], axis=-1)
    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        x = (x | (x << shift)) & mask
    return x.reshape(*words.shape[:-1], -1)


class _Heads(GuidedCodec):
    """What keys and values have in common. The guide gives ``bits`` ``(B, H, blocks)``, each of ``choices``.

    Codes: those of the plain codec of ``choices[0]`` bits for the low plane and the parameters, ``bits`` uint8
    ``(B, H, blocks)`` and, where there are shared planes, ``shared``: words like ``words`` with planes for heads.
    """

    def __init__(self, plain: ChannelAffine | TokenAffine, finer: Sequence[ChannelAffine | TokenAffine], planes: int):
        self._plain, self._finer, self.planes = plain, list(finer), planes
        self.group, self.bits, self.choices = plain.group, plain.bits, [c.bits for c in (plain, *finer)]
        self.unit = unit_bits(self.choices)

    def _blocks(self, x: mx.array) -> mx.array:
        """``(B, H, n, D)`` as ``(B, H, blocks, block, D)``."""
        return x.reshape(*x.shape[:2], -1, self.block, x.shape[3])

    def _slots(self, codes: Codes) -> tuple[mx.array, mx.array, mx.array]:
        """Of every shared plane ``(B, planes, blocks)``: its head, its level (float32), 0 where it is not in use."""
        units = mx.maximum(codes["bits"].astype(mx.int32) - self.bits, 0) // self.unit
        last = mx.cumsum(units, axis=1)
        slot = mx.arange(self.planes, dtype=mx.int32)[:, None]
        head = (last[:, :, None] <= slot).sum(axis=1).astype(mx.int32)
        used = head < units.shape[1]
        head = mx.minimum(head, units.shape[1] - 1)
        level = slot - mx.take_along_axis(last - units, head, axis=1)
        weight = mx.power(2.0, (self.bits + self.unit * level).astype(mx.float32))
        return head, mx.where(used, level, 0), mx.where(used, weight, 0.0)

    def _factor(self, codes: Codes) -> mx.array:
        """Words of the shared planes for products: single bits as codes of two."""
        return spread(codes["shared"]) if self.unit == 1 else codes["shared"]

    def _of_heads(self, x: mx.array, head: mx.array) -> mx.array:
        """``x`` ``(B, H, blocks, ., .)`` of the heads ``(B, planes, blocks)``."""
        index = head[..., None, None]
        return mx.take_along_axis(x, mx.broadcast_to(index, (*head.shape, *x.shape[3:])), axis=1)

    def _to_heads(self, x: mx.array, head: mx.array, heads: int) -> mx.array:
        """Sums ``(B, H, blocks, ., .)`` over the planes of each head; ``x`` is ``(B, planes, blocks, ., .)``."""
        b, planes, blocks, *rest = x.shape
        mine = (head[:, None] == mx.arange(heads, dtype=mx.int32)[:, None, None]).astype(x.dtype)
        sums = mine.transpose(0, 3, 1, 2) @ x.swapaxes(1, 2).reshape(b, blocks, planes, -1)
        return sums.reshape(b, blocks, heads, *rest).swapaxes(1, 2)

    def _split(self, levels: mx.array, bits: mx.array) -> tuple[mx.array, mx.array]:
        """Codes ``(B, H, n, D)`` uint8 as the low plane and the shared ones, ``(B, planes, n, D)``."""
        upper = self._blocks(levels >> self.bits)
        head, level, weight = self._slots({"bits": bits})
        shift = (self.unit * level).astype(mx.uint8)[..., None, None]
        plane = (self._of_heads(upper, head) >> shift) & ((1 << self.unit) - 1)
        plane = mx.where(weight[..., None, None] > 0, plane, 0)
        return levels & ((1 << self.bits) - 1), plane.reshape(plane.shape[0], self.planes, *levels.shape[2:])

    def _choose(self, of: Sequence[mx.array], bits: mx.array) -> mx.array:
        """Of arrays ``(B, H, blocks, ...)``, one per choice, that of every head's and block's own bits."""
        out = of[0]
        for array, b in zip(of[1:], self.choices[1:], strict=True):
            out = mx.where((bits == b).reshape(*bits.shape, *[1] * (array.ndim - 3)), array, out)
        return out

    def encode(self, x: mx.array) -> Codes:
        """All heads at the fewest bits."""
        b, h, n, _ = x.shape
        return self.encode_guided(x, mx.full((b, h, n // self.block), self.bits, mx.uint8))


class HeadKeys(_Heads):
    """``ChannelAffine`` with bits per head, in blocks of ``block`` tokens; ``shared`` is ``(B, planes, D, words)``."""

    def __init__(self, choices: Sequence[int], planes: int, group: int, block: int) -> None:
        super().__init__(ChannelAffine(choices[0], group), [ChannelAffine(b, group) for b in choices[1:]], planes)
        _check_block(block, choices, group)
        self.block = block
        params = Axis(-1, block // group)
        layout = {"words": Axis(-1, block * self.bits // 32), "scales": params, "biases": params, "bits": Axis(-1, 1)}
        if planes:
            self._plane, self._reader = ChannelAffine(self.unit, group), ChannelAffine(max(self.unit, 2), group)
            layout["shared"] = Axis(-1, block * self.unit // 32)
        self.layout = layout

    def encode_guided(self, x: mx.array, guide: mx.array) -> Codes:
        b, h, n, dim = x.shape
        groups = x.astype(mx.float32).reshape(b, h, n // self.block, -1, self.group, dim)
        found = zip(*(c._quantize(groups, -2) for c in (self._plain, *self._finer)), strict=True)
        levels, scales, biases = (self._choose(of, guide) for of in found)
        out = {"bits": guide.astype(mx.uint8)}
        low = levels.astype(mx.uint8).reshape(x.shape)
        if self.planes:
            low, planes = self._split(low, out["bits"])
            out["shared"] = pack(planes.swapaxes(-1, -2), self.unit)
        out["words"] = pack(low.swapaxes(-1, -2), self.bits)
        for name, a in (("scales", scales), ("biases", biases)):
            out[name] = a.reshape(b, h, -1, dim).swapaxes(-1, -2)
        return out

    def _planes(self, codes: Codes) -> mx.array:
        """Levels ``(B, planes, blocks, D, block)`` of the shared planes, float32."""
        planes = lookup(codes["shared"], self.unit, self._plane._table)
        return planes.reshape(*planes.shape[:3], -1, self.block).swapaxes(2, 3)

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        levels = self._plain._levels(codes)
        if self.planes:
            head, _, weight = self._slots(codes)
            upper = self._to_heads(self._planes(codes) * weight[..., None, None], head, levels.shape[1])
            levels = levels + upper.swapaxes(2, 3).reshape(levels.shape)
        groups = levels.reshape(*levels.shape[:3], -1, self.group)
        out = groups * codes["scales"].astype(mx.float32)[..., None] + codes["biases"].astype(mx.float32)[..., None]
        return cast(out.reshape(levels.shape).swapaxes(-1, -2), dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        if not self._plain._native(False):
            return super().scores(q, codes)
        low = self._plain._product(q, codes, False)
        if not self.planes:
            return low
        parts: list[mx.array] = []
        for tile in [codes] if self._reader._native(False) else self.tiles(codes):
            parts.append(self._shared_scores(q, after(tile, parts[-1:])))
        return low + (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1))

    def _shared_scores(self, q: mx.array, codes: Codes) -> mx.array:
        """What the shared planes add to the scores: one product with planes and blocks as batch axes."""
        b, h, rows, dim = q.shape
        head, _, weight = self._slots(codes)
        queries = self._of_heads(mx.broadcast_to(q[:, :, None], (b, h, head.shape[2], rows, dim)), head)
        scales = codes["scales"].reshape(b, h, dim, head.shape[2], -1).swapaxes(2, 3)
        scales = self._of_heads(scales, head)
        if self._reader._native(False):
            words = self._factor(codes).reshape(b, self.planes, dim, head.shape[2], -1).swapaxes(2, 3)
            plane = {"words": words, "scales": scales, "biases": mx.zeros_like(scales)}
            found = self._reader._product(queries, plane, False)
        else:
            wide = compute_dtype(q.dtype)
            planes = self._planes(codes).astype(wide) * mx.repeat(scales, self.group, axis=-1).astype(wide)
            found = (queries.astype(wide) @ planes).astype(q.dtype)
        # Scales of float16 would not hold the weight of an upper plane of large numbers.
        found = found * weight[..., None, None].astype(found.dtype)
        return self._to_heads(found, head, h).swapaxes(2, 3).reshape(b, h, rows, -1)


class HeadValues(_Heads):
    """``TokenAffine`` with bits per head, in blocks of ``block`` tokens; ``shared`` is ``(B, planes, n, words)``."""

    def __init__(self, choices: Sequence[int], planes: int, group: int, block: int, *, dim: int) -> None:
        finer = [TokenAffine(b, group, dim=dim) for b in choices[1:]]
        super().__init__(plain := TokenAffine(choices[0], group, dim=dim), finer, planes)
        self.block, self._rows = block, plain
        rows = Axis(2, block)
        layout = {"words": rows, "scales": rows, "biases": rows, "bits": Axis(-1, 1)}
        if planes:
            self._plane = TokenAffine(self.unit, group, dim=dim)
            self._reader = TokenAffine(max(self.unit, 2), group, dim=dim)
            layout["shared"] = rows
        self.layout = layout

    def encode_guided(self, x: mx.array, guide: mx.array) -> Codes:
        b, h, n, _ = x.shape
        x = self._rows._pad(x.astype(mx.float32), mode="edge")
        groups = x.reshape(b, h, n // self.block, self.block, -1, self.group)
        found = zip(*(c._quantize(groups, -1) for c in (self._plain, *self._finer)), strict=True)
        levels, scales, biases = (self._choose(of, guide) for of in found)
        out = {"bits": guide.astype(mx.uint8)}
        low = levels.astype(mx.uint8).reshape(x.shape)
        if self.planes:
            low, planes = self._split(low, out["bits"])
            out["shared"] = pack(planes, self.unit)
        out["words"] = pack(low, self.bits)
        return out | {name: a.reshape(b, h, n, -1) for name, a in (("scales", scales), ("biases", biases))}

    def _scaled(self, codes: Codes, head: mx.array) -> mx.array:
        """Float32 rows ``(B, planes, blocks, block, padded_dim)`` of the shared planes, without weights and biases."""
        planes = self._blocks(lookup(codes["shared"], self.unit, self._plane._table))
        scales = self._of_heads(self._blocks(codes["scales"]), head).astype(mx.float32)
        return planes * mx.repeat(scales, self.group, axis=-1)

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        rows = self._rows._decode(codes, mx.float32)
        if self.planes:
            head, _, weight = self._slots(codes)
            planes = self._scaled(codes, head) * weight[..., None, None]
            rows = rows + self._to_heads(planes, head, rows.shape[1]).reshape(rows.shape)
        return cast(rows[..., : self._rows.dim], dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        if not self._plain._native(False):
            return super().mix(p, codes)
        out, start = self._rows._product(p, codes, False).astype(mx.float32), 0
        if self.planes:
            for tile in [codes] if self._reader._native(False) else self.tiles(codes):
                stop = start + self.n_tokens(tile)
                out, start = out + self._shared_mix(p[..., start:stop], after(tile, [out])), stop
        return out[..., : self._rows.dim].astype(p.dtype)

    def _shared_mix(self, p: mx.array, codes: Codes) -> mx.array:
        """What the shared planes add to the sums ``(B, H, R, padded_dim)``, float32."""
        b, h, rows, _ = p.shape
        head, _, weight = self._slots(codes)
        share = self._of_heads(p.reshape(b, h, rows, head.shape[2], self.block).swapaxes(2, 3), head)
        if self._reader._native(False):
            scales, words = self._of_heads(self._blocks(codes["scales"]), head), self._blocks(self._factor(codes))
            found = self._reader._product(
                share, {"words": words, "scales": scales, "biases": mx.zeros_like(scales)}, False
            )
        else:
            wide = compute_dtype(p.dtype)
            found = share.astype(wide) @ self._scaled(codes, head).astype(wide)
        found = found.astype(mx.float32) * weight[..., None, None]
        return self._to_heads(found, head, h).sum(axis=2)


def _check_block(block: int, choices: Sequence[int], group: int) -> None:
    multiple = block_multiple(choices, group)
    if not is_int(block) or block < 1 or block % multiple:
        raise QuantizerConfigError(
            f"block={block!r}: must be a multiple of {multiple}, whole groups of {group} tokens in whole words"
        )
