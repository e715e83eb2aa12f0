"""Bytes of heads that compete: every head is as long as the longest, which the keys decide."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from tests import matrix
from veloxquant_mlx.policies import select
from veloxquant_mlx.policies.anomaly import Anomaly
from veloxquant_mlx.policies.heads import Compete


def competing(budget: int, sinks: int = 4, share: float = 0.2) -> Callable[[int, matrix.Shape, int], int]:
    """Float rows with room to grow and int32 positions per head, for the float16 keys of ``matrix.tensors``."""

    def held(tokens: int, shape: matrix.Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        n = tokens if tokens <= budget else longest(tokens, shape)
        index = 4 * n if tokens > budget else 0
        return b * h * (matrix.up(n, matrix.GROW) * (dk + dv) * itemsize + index)

    def longest(tokens: int, shape: matrix.Shape) -> int:
        keys = matrix.tensors(tokens, shape, dtype=mx.float16).k.astype(mx.float32)
        score = Anomaly(64, 3.0, 0.6, 10.0).of(keys, mx.ones(keys.shape[:3], mx.bool_))
        score = select.protect(score, mx.arange(tokens)[None, None], sinks, 1, tokens)
        return Compete.sharing(budget, share).of(score, budget)[0].shape[-1]

    return held
