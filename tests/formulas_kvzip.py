"""Bytes of kvzip's probe "latest": heads compete, every head is as long as the longest, which attention decides."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from tests import matrix
from veloxquant_mlx.policies.heads import Compete

WINDOW = 32


def latest(budget: int, sinks: int = 4) -> Callable[[int, matrix.Shape, int], int]:
    """Float rows with room to grow, and the newest queries or positions, for the data of ``matrix.tensors``."""

    def held(tokens: int, shape: matrix.Shape, itemsize: int) -> int:
        b, h, dk, dv = shape
        n = tokens if tokens <= budget else longest(tokens, shape)
        queries = matrix.REPEATS * min(tokens, WINDOW) * dk * itemsize
        index = 4 * n if tokens > budget else queries
        return b * h * (matrix.up(n, matrix.GROW) * (dk + dv) * itemsize + index)

    def longest(tokens: int, shape: matrix.Shape) -> int:
        data = matrix.tensors(tokens, shape, dtype=mx.float16)
        q, k = data.q[:, :, -WINDOW:].astype(mx.float32), mx.repeat(data.k, matrix.REPEATS, axis=1).astype(mx.float32)
        causal = mx.arange(tokens - WINDOW, tokens)[:, None] >= mx.arange(tokens)
        p = mx.softmax(mx.where(causal, 0.125 * q @ k.swapaxes(-1, -2), -mx.inf), axis=-1)
        score = p.reshape(shape[0], shape[1], -1, tokens).max(axis=2)
        stays = (mx.arange(tokens) < sinks) | (mx.arange(tokens) >= tokens - WINDOW)
        return Compete(0).of(mx.where(stays, mx.inf, score), budget)[0].shape[-1]

    return held
