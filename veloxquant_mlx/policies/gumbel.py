"""Keyformer's score: attention under Gumbel noise and a temperature, summed over all queries.

Adnan et al., "Keyformer: KV Cache reduction through key tokens selection for Efficient Generative Inference",
arXiv:2403.09054.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .observed import SummedAttention, seen, weights

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step

# The smallest uniform number: 0 would be noise of minus infinity.
TINY = 2.0**-33


def stream(seed: int, layer: int) -> tuple[int, int]:
    """The two key words of a layer's noise."""
    first, second = np.random.SeedSequence([seed, layer]).generate_state(2, np.uint32).tolist()
    return first, second


def noise(words: tuple[int, int], at: mx.array, heads: mx.array, positions: mx.array) -> mx.array:
    """Standard Gumbel numbers, one for every (query position, query head, key position), in the broadcast shape.

    Each comes from a random key of its own, so that it depends on neither how a prompt is fed nor on which rows are
    held, nor in which order. ``at``, ``heads`` and ``positions`` are int32.
    """
    queries = mx.array(words, mx.uint32) + at.astype(mx.uint32)[..., None] * mx.array([0, 1], mx.uint32)
    queries = mx.vmap(lambda key: mx.random.split(key)[0])(queries.reshape(-1, 2)).reshape(queries.shape)
    first, second = queries[..., 0] + heads.astype(mx.uint32), queries[..., 1] + positions.astype(mx.uint32)
    keys = mx.stack(list(mx.broadcast_arrays(first, second)), axis=-1)
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(), key=key))(keys.reshape(-1, 2)).reshape(keys.shape[:-1])
    return -mx.log(-mx.log(mx.maximum(uniform, TINY)))


@dataclass(frozen=True)
class NoisyAttention(SummedAttention):
    """Weights ``softmax((z + g) / tau)`` of every query, summed over all queries, with fresh Gumbel noise ``g``.

    ``tau`` is ``tau_init`` for a prompt; the t-th decode step after it is ``min(t, steps) / steps`` of the way to
    ``tau_end``. ``tau_init=0`` means no noise and no temperature: attention as it is. A learned sink's logit gets no
    noise, but the temperature.
    """

    words: tuple[int, int] = (0, 0)
    tau_init: float = 1.0
    tau_end: float = 1.0
    steps: int = 0

    @property
    def arrays(self) -> int:
        return 6  # a key of two words, its number and its logarithms for every logit

    def observe(self, store: Store, step: Step) -> None:
        if self.steps:
            done = mx.zeros(()) if step.prompt else store.aux["steps"] + 1
            store.aux["steps"] = done
        super().observe(store, step)

    def temperature(self, store: Store) -> float | mx.array:
        """That of the queries being seen."""
        if not self.steps:
            return self.tau_init
        return self.tau_init + mx.minimum(store.aux["steps"], self.steps) / self.steps * (self.tau_end - self.tau_init)

    def weights(self, store: Store, z: mx.array, positions: mx.array, at: mx.array, sinks: mx.array | None) -> mx.array:
        if self.tau_init == 0:
            return super().weights(store, z, positions, at, sinks)
        tau = self.temperature(store)
        heads = mx.arange(z.shape[1] * z.shape[2]).reshape(z.shape[1], z.shape[2], 1, 1)
        noisy = (z + noise(self.words, at, heads, positions)) / tau
        return weights(noisy, seen(positions, at), None if sinks is None else sinks.astype(mx.float32) / tau)
