"""The truth that every other path is tested against: plain attention in float32 over decoded rows."""

from __future__ import annotations

import mlx.core as mx

from . import masks


def attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: masks.Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of ``q`` ``(B, Hq, L, D)`` over ``keys``/``values`` ``(B, H, n, D)``; returns q's dtype.

    ``sinks`` ``(Hq,)`` are learned sink logits: they take part in the softmax's denominator and carry no value.
    """
    b, hq, length, d = q.shape
    h, n = keys.shape[1], keys.shape[2]
    rows = (q.astype(mx.float32) * scale).reshape(b, h, hq // h, length, d)
    scores = rows @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    weights = softmax(masks.apply(scores, mask, past=n - length), sinks)
    out = weights @ values.astype(mx.float32)[:, :, None]
    return out.reshape(b, hq, length, values.shape[-1]).astype(q.dtype)


def softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Weights ``(B, H, R, L, n)`` in float32; a learned sink takes its share and is dropped."""
    scores = scores.astype(mx.float32)
    if sinks is None:
        return mx.softmax(scores, axis=-1)
    b, h, r, length, n = scores.shape
    column = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, h, r, 1, 1), (b, h, r, length, 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1)[..., :n]
