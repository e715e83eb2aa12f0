"""Groups of neighbouring tokens as one anchor in 8 bits and differences to it in fewer.

Source: CacheGen (Liu et al., SIGCOMM 2024, arXiv:2310.07240). Scales per token and head are our choice.
"""

from __future__ import annotations

import mlx.core as mx

from .base import Axis, Codec, Codes, cast, compute_dtype
from .symmetric import TokenSymmetric

ANCHOR_BITS = 8


class Anchored(Codec):
    """The first token of every ``group`` in 8 bits, the others as ``bits``-bit differences to the decoded anchor.

    Codes, ``g = n / group``: ``words`` uint32 ``(B, H, g * (group - 1), W)`` and ``scales`` float16
    ``(B, H, g * (group - 1))`` of the differences, ``anchors`` uint32 ``(B, H, g, D / 4)`` and ``anchor_scales``
    float16 ``(B, H, g)``. Differences are to the decoded anchor, so that its error is not added to theirs.
    """

    def __init__(self, bits: int, group: int, *, dim: int, per_channel: bool = True) -> None:
        self.deltas = TokenSymmetric(bits, dim=dim, per_channel=per_channel)
        # 255 levels: a table for every channel would be larger than the anchors
        self.anchors = TokenSymmetric(ANCHOR_BITS, dim=dim, per_channel=False)
        self.block = self.group = group
        self.layout = {
            "words": Axis(-2, group - 1),
            "scales": Axis(-1, group - 1),
            "anchors": Axis(-2, 1),
            "anchor_scales": Axis(-1, 1),
        }
        self.symbols = {"words": self.deltas.symbols["words"], "anchors": self.anchors.symbols["words"]}

    def encode(self, x: mx.array) -> Codes:
        b, h, n, dim = x.shape
        groups = x.astype(mx.float32).reshape(b, h, n // self.group, self.group, dim)
        anchors = self.anchors.encode(groups[..., 0, :])
        deltas = groups[..., 1:, :] - self.anchors.decode(anchors)[..., None, :]
        codes = self.deltas.encode(deltas.reshape(b, h, -1, dim))
        return codes | {"anchors": anchors["words"], "anchor_scales": anchors["scales"]}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        anchors = self.anchors.decode(_anchors(codes))[..., None, :]
        b, h, g, _, dim = anchors.shape
        deltas = self.deltas.decode(codes).reshape(b, h, g, self.group - 1, dim)
        rows = mx.concatenate([anchors, anchors + deltas], axis=3)
        return cast(rows.reshape(b, h, g * self.group, dim), dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        """The anchor's score, once per group, plus the score of each difference."""
        query = q.astype(compute_dtype(q.dtype))
        anchors = self.anchors.scores(query, _anchors(codes))[..., None]
        b, h, r, g, _ = anchors.shape
        deltas = self.deltas.scores(query, codes).reshape(b, h, r, g, self.group - 1)
        return mx.concatenate([anchors, anchors + deltas], axis=-1).reshape(b, h, r, -1).astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        """Anchors under the summed weights of their groups, plus the differences under their own."""
        b, h, r, n = p.shape
        weights = p.astype(compute_dtype(p.dtype)).reshape(b, h, r, n // self.group, self.group)
        anchors = self.anchors.mix(weights.sum(-1), _anchors(codes))
        return (anchors + self.deltas.mix(weights[..., 1:].reshape(b, h, r, -1), codes)).astype(p.dtype)


def _anchors(codes: Codes) -> Codes:
    return {"words": codes["anchors"], "scales": codes["anchor_scales"]}
