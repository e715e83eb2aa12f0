"""The constant part of a layer's keys: what a large bias of the key projection (Qwen2 and its kind) adds to every key.

The rotary embedding spreads it over the whole range of a channel, and groups of tokens lose their bits to it. It is
known exactly, without data: it is what the layer makes of a zero hidden state.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from ..core.types import Recipe
from .rope import Rotation

NOTE = "keys are packed without the constant part that a bias of the layer's key projection adds; scores put it back"


class KeyBias:
    """``vector`` ``(H, D)`` before rotation, and the rotation that stored keys carry (None: none).

    What is taken out of a row before it is encoded comes back in scores, computed from tables that all heads share.
    """

    def __init__(self, vector: np.ndarray, rotation: Rotation | None) -> None:
        self.vector, self._rotation = vector, rotation
        self._vector = mx.array(vector.astype(np.float32))[None, :, None, :]
        if rotation is None:
            return
        partner = rotation.partner
        first = np.flatnonzero(partner > np.arange(partner.size))
        second, still = partner[first], np.flatnonzero(partner == np.arange(partner.size))
        self._channels = tuple(mx.array(index.astype(np.int32)) for index in (first, second, still))
        self._turns = mx.array((rotation.rate[first] / (2 * np.pi)).astype(np.float32))

    def taken_out(self, recipe: Recipe) -> Recipe:
        """``recipe`` with packed keys free of it; where keys are packed before rotation, it is not rotated either."""
        if recipe.keys.codec is None:
            return recipe
        own = self if recipe.keys.rotation is None else KeyBias(self.vector, None)
        return replace(recipe, keys=replace(recipe.keys, bias=own), notes=(*recipe.notes, NOTE))

    def rows(self, positions: mx.array) -> mx.array:
        """What keys at ``positions`` ``(B | 1, H | 1, n)`` contain of it, ``(B | 1, H, n | 1, D)`` float32."""
        if self._rotation is None:
            return self._vector
        lead = mx.broadcast_shapes(self._vector.shape[:2], positions.shape[:2])
        wide = mx.broadcast_to(self._vector, (*lead, positions.shape[2], self._vector.shape[3]))
        return self._rotation.turn(wide, positions)

    def scores(self, q: mx.array, positions: mx.array) -> mx.array:
        """Dot products ``(B, H, R, n | 1)`` of query rows ``q`` ``(B, H, R, D)`` with ``rows(positions)``."""
        b = self._vector.astype(q.dtype)
        if self._rotation is None:
            return (q * b).sum(axis=-1, keepdims=True)
        first, second, still = self._channels
        q1, q2, b1, b2 = (mx.take(x, index, axis=-1) for x in (q, b) for index in (first, second))
        turns = positions[..., None].astype(mx.float32) * self._turns
        angle = (turns - mx.floor(turns)) * (2 * np.pi)
        table = mx.concatenate([mx.cos(angle), mx.sin(angle)], axis=-1).astype(q.dtype)
        weights = mx.concatenate([q1 * b1 + q2 * b2, q1 * b2 - q2 * b1], axis=-1)
        out = weights @ table.swapaxes(-1, -2)
        if still.size:
            out = out + (mx.take(q, still, axis=-1) * mx.take(b, still, axis=-1)).sum(axis=-1, keepdims=True)
        return out
