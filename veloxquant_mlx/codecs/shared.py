"""Integer codes that the layers of a group share; each layer has scales and offsets, and maybe a residual, of its own.

XQuant (Yang et al., EMNLP 2025, arXiv 2510.11236).
"""

from __future__ import annotations

from math import lcm

import mlx.core as mx

from .affine import ChannelAffine, TokenAffine
from .base import F16_MAX, Axis, Codec, Codes, cast
from .joint import JointCodec

# How far the two outer levels move inwards, as a share of the range: middle values of the grids of the paper's code.
SHIFT = {1: 1 / 6, 2: 0.045}


class _Relaxed:
    """Codes by the plain min/max grid, at one bit too; levels that are drawn towards the middle of the range."""

    bits: int

    def _ends(self, groups: mx.array, axis: int) -> tuple[mx.array, mx.array]:
        return groups.min(axis, keepdims=True), mx.minimum(groups.max(axis, keepdims=True), F16_MAX)

    def _quantize(self, groups: mx.array, axis: int) -> tuple[mx.array, mx.array, mx.array]:
        codes, scales, biases = super()._quantize(groups, axis)  # type: ignore[misc]
        share = SHIFT.get(self.bits, 0.0)
        if share:
            step = scales.astype(mx.float32)
            biases = (biases.astype(mx.float32) + share * step * ((1 << self.bits) - 1)).astype(mx.float16)
            scales = ((1 - 2 * share) * step).astype(mx.float16)
        return codes, scales, biases


class RelaxedChannels(_Relaxed, ChannelAffine):
    """``ChannelAffine`` with relaxed levels."""


class RelaxedTokens(_Relaxed, TokenAffine):
    """``TokenAffine`` with relaxed levels."""


class SharedCodes(JointCodec):
    """``base`` in every layer of a group, with the codes of the first; ``residual`` for what the others then miss.

    Codes: ``words`` of ``base``, shared; ``m<j>.scales`` and ``m<j>.biases``; in layers after the first
    ``m<j>.r_words``, ``m<j>.r_scales`` and ``m<j>.r_biases`` of ``residual`` (None: nothing makes up for what the
    codes of another layer miss).
    """

    def __init__(
        self,
        base: ChannelAffine | TokenAffine,
        residual: ChannelAffine | TokenAffine | None,
        members: int = 1,
        member: int = 0,
    ) -> None:
        super().__init__(members, member)
        self.base, self.residual = base, residual if members > 1 else None
        self.block = lcm(base.block, self.residual.block if self.residual else 1)

        def axis(codec: Codec, name: str) -> Axis:
            along, slots = codec.layout[name]
            return Axis(along, slots * self.block // codec.block)

        self.layout = {"words": axis(base, "words")}
        for j in range(members):
            self.layout |= {f"m{j}.{name}": axis(base, name) for name in ("scales", "biases")}
            if j and self.residual:
                self.layout |= {f"m{j}.r_{name}": axis(self.residual, name) for name in self.residual.layout}

    def encode(self, x: mx.array) -> Codes:
        out: Codes = {}
        for j, part in enumerate(self.parts(x)):
            codes = self.base.encode(part)
            words = out.setdefault("words", codes["words"])
            out |= {f"m{j}.{name}": codes[name] for name in ("scales", "biases")}
            if j and self.residual:
                missed = part.astype(mx.float32) - self.base.decode(codes | {"words": words})
                out |= {f"m{j}.r_{name}": a for name, a in self.residual.encode(missed).items()}
        return out

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        if (own := self._own(codes)) is None:
            return self.base.decode(self._base(codes), dtype)
        residual, missed = own
        return cast(self.base.decode(self._base(codes)) + residual.decode(missed), dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        out, own = self.base.scores(q, self._base(codes)), self._own(codes)
        return out if own is None else out + own[0].scores(q, own[1])

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        out, own = self.base.mix(p, self._base(codes)), self._own(codes)
        return out if own is None else out + own[0].mix(p, own[1])

    def _base(self, codes: Codes) -> Codes:
        return {"words": codes["words"], **{name: codes[self.own(name)] for name in ("scales", "biases")}}

    def _own(self, codes: Codes) -> tuple[Codec, Codes] | None:
        """This layer's residual and the codes of it, None where it has none."""
        if self.residual is None or not self.member:
            return None
        return self.residual, {name: codes[self.own(f"r_{name}")] for name in self.residual.layout}
