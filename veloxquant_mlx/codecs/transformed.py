"""A codec that works in another basis of the head dimension."""

from __future__ import annotations

import mlx.core as mx

from ..transforms.base import Transform
from ..transforms.rotation import RandomHadamard
from .base import Codec, Codes, Readable, cast


class Transformed(Codec):
    """``codec`` behind ``transform``: rows are mapped before they are encoded.

    Attention maps the query once and the weighted sum back once per call; stored rows are never mapped back.
    """

    def __init__(self, codec: Codec, transform: Transform) -> None:
        self.codec, self.transform = codec, transform
        self.block, self.layout, self.symbols = codec.block, codec.layout, codec.symbols
        self.fit_rows = codec.fit_rows

    def fit(self, x: mx.array) -> Codes:
        return self.codec.fit(self.transform.forward(x))

    def bind(self, fitted: Codes) -> Transformed:
        return Transformed(self.codec.bind(fitted), self.transform)

    def encode(self, x: mx.array) -> Codes:
        return self.codec.encode(self.transform.forward(x))

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return cast(self.transform.inverse(self.codec.decode(codes)), dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        return self.codec.scores(self.transform.on_query(q).astype(q.dtype), codes)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        return self.transform.inverse(self.codec.mix(p, codes)).astype(p.dtype)

    def readable(self, codes: Codes) -> Readable | None:
        inner = self.codec.readable(codes)
        if inner is None:
            return None
        out, dim = inner.behind(self.transform.on_query, self.transform.inverse), inner.dim
        if inner.on_query is None and isinstance(self.transform, RandomHadamard) and dim >= 32 and dim & (dim - 1) == 0:
            return out._replace(signs=self.transform.signs)
        return out
