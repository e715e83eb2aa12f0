"""A codec and what it misses: extremes kept exact, and a low-rank fit of the remaining error.

The three parts of GEAR (Kang et al., arXiv 2403.05527): ``X ~ quantised(X without S) + low rank + S``.
"""

from __future__ import annotations

import mlx.core as mx

from .base import F16_MAX, Axis, Codec, Codes, cast
from .lowrank import LowRank
from .sparse import ChannelSparse, Sparse, TokenSparse, extremes


class Residual(Codec):
    """``base`` with ``fraction`` of the numbers of every vector kept exact, and a fit of rank ``rank`` of the error.

    The largest and smallest numbers of a vector are replaced by its mean before ``base`` encodes, so that they do not
    stretch its ranges: half of the fraction at each end, rounded. A vector is a channel over the tokens of a block
    (``per_channel``), or a token over all heads, which keeps at least one number at each end.

    ``block`` tokens make a block, fitted on its own. ``None`` takes all tokens of an ``encode`` as one block, whatever
    their number: the last token is repeated until the blocks of ``base`` are full. ``energy`` is that of ``LowRank``.
    Codes: those of the parts. Attention visits the parts one by one; the factors are never multiplied out.
    """

    def __init__(
        self,
        base: Codec,
        rank: int,
        fraction: float,
        *,
        per_channel: bool,
        block: int | None = None,
        energy: float | None = None,
    ) -> None:
        self.base, self.fraction, self.whole = base, fraction, block is None
        self.block = block or base.block
        self.low_rank = LowRank(rank, block, energy)
        self.sparse: Sparse = ChannelSparse(block) if per_channel else TokenSparse()
        step = self.block // base.block
        self.layout = {name: Axis(axis, slots * step) for name, (axis, slots) in base.layout.items()}
        if block is not None:
            if rank and block >= 4:
                self.layout |= {"left": Axis(2, block), "right": Axis(2, 1)}
            if not per_channel and fraction:
                self.layout |= {name: Axis(axis, block) for name, (axis, _) in self.sparse.layout.items()}
            elif self._count(block):
                self.layout |= self.sparse.layout

    def _count(self, length: int) -> int:
        """Exact numbers of a vector of ``length`` numbers, both ends together."""
        ends = int(self.fraction / 2 * length + 0.5)
        if isinstance(self.sparse, TokenSparse) and self.fraction:
            ends = max(ends, 1)
        return 2 * ends

    def encode(self, x: mx.array) -> Codes:
        x = mx.clip(x.astype(mx.float32), -F16_MAX, F16_MAX)
        vectors = self.sparse.vectors(x)
        count, inliers, index = self._count(vectors.shape[-1]), x, None
        if count:
            index = extremes(vectors, count)
            mean = vectors.mean(-1, keepdims=True)
            inliers = self.sparse.rows(mx.put_along_axis(vectors, index, mean, axis=-1), x)
        n, spare = x.shape[2], -x.shape[2] % self.block
        if spare:
            inliers = mx.pad(inliers, [(0, 0), (0, 0), (0, spare), (0, 0)], mode="edge")
        codes = self.base.encode(inliers)
        dense = self.base.decode(codes)[:, :, :n]
        error = x - dense
        if index is not None:  # what is kept exact leaves no error
            zeros = mx.put_along_axis(self.sparse.vectors(error), index, mx.array(0.0), axis=-1)
            error = self.sparse.rows(zeros, x)
        factors = self.low_rank.encode(error)
        if factors:
            dense = self.low_rank.add(dense, factors)
            left = mx.pad(factors["left"], [(0, 0), (0, 0), (0, spare), (0, 0)]) if spare else factors["left"]
            codes |= {"left": left, "right": factors["right"]}
        return codes if index is None else codes | self.sparse.encode(x - dense, index)

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        rows = self.base.decode(codes)
        if "left" in codes:
            rows = self.low_rank.add(rows, codes)
        if "sparse_index" in codes:
            rows = self.sparse.add(rows, codes)
        return cast(rows, dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        out = self.base.scores(q, codes)
        if "left" in codes:
            out = out + self.low_rank.scores(q, codes).astype(q.dtype)
        if "sparse_index" in codes:
            out = out + self.sparse.scores(q, codes, out.shape[-1]).astype(q.dtype)
        return out

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        spare = self.n_tokens(codes) - p.shape[-1]
        if spare:
            p = mx.pad(p, [(0, 0)] * 3 + [(0, spare)])
        out = self.base.mix(p, codes)
        if "left" in codes:
            out = out + self.low_rank.mix(p, codes).astype(p.dtype)
        if "sparse_index" in codes:
            out = out + self.sparse.mix(p, codes, out.shape[-1]).astype(p.dtype)
        return out

    def cut(self, codes: Codes, start: int, stop: int) -> Codes:
        if not self.whole:
            return super().cut(codes, start, stop)
        out = self.base.cut(codes, start, stop)
        if "left" in codes:
            out |= {"left": codes["left"][:, :, start:stop], "right": codes["right"]}
        return out | self.sparse.part(codes, start, stop) if "sparse_index" in codes else out
