"""How much compressing each layer costs: measured on the model, one layer at a time.

The text is read as a prompt, then in short chunks whose predictions count: their attention reads compressed rows.
Two things are measured. Divergence: KL of the model's predictions with only one layer compressed, at one probe width;
this is what counts, and costs a pass per layer. Error: squared error of each layer's attention output at every width,
with exact inputs, all in one pass; it gives the shape of the layer's curve.
Divergence grows with the square of a small change, so a layer at ``b`` bits is expected to cost
``divergence * error(b) / error(probe)``, and layers add up.

Why so: SmolLM2-135M with kivi at 3 bits on average, KL on text that was not measured on: uniform 0.0144, this 0.0122
(0.0124 with the probe at 3 bits instead of 2), errors alone as weights 0.0150, worse than uniform: they do not know how
much the layers above make of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.base import KVCacheConfig
from ..cache.layer import CompressedKVCache
from ..core.exceptions import CacheInputError
from ..methods._method import refuse
from ..models.inspect import cache_slots
from .allocate import CHOICES, Curve, allocate_bits, expected
from .collect import Call, Progress, hooked_slots, watched
from .widths import for_layers, valid_bits

CHUNK = 32  # tokens whose predictions are made together: their own rows are exact, so it must be short
STEP = 512  # tokens of the prompt at a time


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """What was measured, per compressed layer: ``indices`` are entries of the cache list.

    ``samples`` are the KL (nats) of every prediction with only this layer compressed to ``probe`` bits, ``errors`` the
    mean squared error of its attention output at each width. ``readers`` are the entries that take an element of a list
    of bits; those that keep the model's own cache are among them.
    """

    indices: tuple[int, ...]
    readers: tuple[int, ...]
    probe: int
    samples: tuple[np.ndarray, ...]
    errors: tuple[Curve, ...]

    @property
    def divergence(self) -> list[float]:
        """Mean KL with only this layer compressed to ``probe`` bits."""
        return [float(kl.mean()) for kl in self.samples]

    @property
    def curves(self) -> list[Curve]:
        """``errors`` relative to the one at ``probe`` bits."""
        return [{b: e / errors[self.probe] for b, e in errors.items()} for errors in self.errors]

    @property
    def choices(self) -> tuple[int, ...]:
        return tuple(sorted(self.errors[0]))

    def allocate(self, average: float) -> list[int]:
        """Bits of the compressed layers for an average over them."""
        return allocate_bits(self.divergence, average, distortion=self.curves, choices=self.choices)

    def blind(self, average: float) -> list[int]:
        """The same sum of bits for layers of which nothing is known: uniform where the average is a choice."""
        return allocate_bits([1.0] * len(self.indices), average, choices=self.choices)

    def predict(self, bits: Sequence[int]) -> float:
        """The mean KL that these bits are expected to cost."""
        return expected(self.divergence, bits, self.curves)

    def gain(self, bits: Sequence[int], rival: Sequence[int]) -> tuple[float, float]:
        """By how much ``bits`` should cost less mean KL than ``rival``, and the standard error of that.

        KL is heavy-tailed: on a short text a small gain is within its error, and another text may turn it round.
        """
        saved = np.zeros(len(self.samples[0]))
        for kl, curve, ours, theirs in zip(self.samples, self.curves, bits, rival, strict=True):
            saved += kl * (curve[theirs] - curve[ours])
        return float(saved.mean()), float(saved.std() / np.sqrt(len(saved)))

    def full(self, bits: Sequence[int]) -> list[int]:
        """``bits`` with an element for every attention layer; one that is not compressed gets the smallest choice."""
        given = dict(zip(self.indices, bits, strict=True))
        return [given.get(index, self.choices[0]) for index in self.readers]


def layer_sensitivity(
    model: Any,
    tokens: Sequence[int],
    config: KVCacheConfig,
    *,
    choices: Sequence[int] | None = None,
    probe: int | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure every compressed layer of ``model`` under ``config``; the first half of ``tokens`` is the prompt.

    ``choices`` (default: those of ``CHOICES`` that the method takes) are the widths to know the error at, ``probe``
    (default: the smallest of them) the width of the passes with one layer compressed. There is one pass more than
    layers; float32 predictions for half of the tokens are held. Raises ``QuantizerConfigError`` for a method without
    such a width (``bit_fields``) and ``CacheInputError`` for a text that is too short for anything to be compressed.
    """
    choices = [b for b in CHOICES if valid_bits(config.method).accepts(b)] if choices is None else choices
    probe = choices[0] if probe is None else probe
    if probe not in choices:
        refuse("probe", probe, f"one of the choices {tuple(choices)}", "Add it to the choices.")
    indices = tuple(slot.index for slot in hooked_slots(model))
    made = {b: for_layers(model, config, b) for b in choices}
    rivals = {index: _Rivals({b: made[b][index] for b in choices}) for index in indices}
    passes = _Passes(model, tokens, len(indices) + 1, progress)
    passes.exact(watched(model, rivals), list(rivals.values()))
    errors = tuple(rivals[index].errors for index in indices)
    if any(curve[probe] == 0 for curve in errors):
        raise CacheInputError(
            f"{config.method!r} at {probe} bits compressed nothing of {len(tokens)} tokens: they fit into its exact "
            "window. Give a longer text or a smaller window."
        )
    samples = []
    for index in indices:
        caches = [slot.native for slot in cache_slots(model)]
        caches[index] = for_layers(model, config, probe)[index]
        samples.append(passes.divergence(caches))
    readers = tuple(slot.index for slot in cache_slots(model) if slot.attention is not None)
    return Sensitivity(indices, readers, probe, tuple(samples), errors)


def divergences(
    model: Any,
    tokens: Sequence[int],
    config: KVCacheConfig,
    bits: Sequence[int | Sequence[int]],
    progress: Progress | None = None,
) -> list[float]:
    """Mean KL (nats) over the second half of ``tokens``, for every list or number of bits in ``bits``."""
    passes = _Passes(model, tokens, len(bits) + 1, progress)
    passes.exact([slot.native for slot in cache_slots(model)], [])
    return [float(passes.divergence(for_layers(model, config, b)).mean()) for b in bits]


class _Rivals:
    """Compressed caches that see what an exact one sees; once ``scored``, their outputs are compared with its own."""

    def __init__(self, caches: dict[int, CompressedKVCache]) -> None:
        self.caches, self.scored, self.count = caches, False, 0
        self.sums = dict.fromkeys(caches, mx.array(0.0))

    def __call__(self, call: Call) -> None:
        for bits, cache in self.caches.items():
            cache.append(call.keys, call.values)
            out = cache.attend(call.queries, scale=call.scale, mask=call.mask, sinks=call.sinks)
            if self.scored:
                difference = (out - call.output).astype(mx.float32)
                self.sums[bits] = self.sums[bits] + mx.sum(difference * difference)
        self.count += call.output.size if self.scored else 0
        mx.eval([cache.arrays() for cache in self.caches.values()], self.sums)

    def end_prefill(self) -> None:
        self.scored = True
        for cache in self.caches.values():
            cache.end_prefill()

    @property
    def errors(self) -> dict[int, float]:
        """Mean squared error of the attention output at each width."""
        return {bits: float(np.array(total)) / self.count for bits, total in self.sums.items()}


class _Passes:
    """Passes over one text, compared with the exact one, which comes first."""

    def __init__(self, model: Any, tokens: Sequence[int], number: int, progress: Progress | None) -> None:
        if len(tokens) < 2:
            raise CacheInputError(f"{len(tokens)} tokens are too few to measure on. Give a longer text.")
        self.model, self.ids, self.half = model, mx.array(list(tokens))[None], len(tokens) // 2
        self.truth: list[mx.array] = []
        self.done, self.total, self.progress = 0, number * len(tokens), progress

    def exact(self, caches: list[Any], watchers: Sequence[_Rivals]) -> None:
        """The pass that the others are compared with."""
        self.truth = [mx.contiguous(logprobs) for logprobs in self._read(caches, watchers)]

    def divergence(self, caches: list[Any]) -> np.ndarray:
        """KL in nats of every prediction of a pass with ``caches``, float64."""
        rows = zip(self.truth, self._read(caches, caches), strict=True)
        return np.concatenate([np.array(_kl(p, q)) for p, q in rows]).astype(np.float64)

    def _read(self, caches: list[Any], ending: Sequence[Any]) -> Iterator[mx.array]:
        """Log-probabilities ``(n, V)`` of the second half, chunk by chunk."""
        length = self.ids.shape[1]
        starts = [*range(0, self.half, STEP), *range(self.half, length, CHUNK), length]
        for start, stop in itertools.pairwise(starts):
            stop = min(stop, self.half) if start < self.half else stop
            logits = self.model(self.ids[:, start:stop], cache=caches)[0]
            if start >= self.half:
                logits = logits.astype(mx.float32)
                logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                mx.eval(logprobs)
                yield logprobs
            mx.eval([cache.state for cache in caches])
            self.done += stop - start
            if self.progress is not None:
                self.progress(self.done, self.total)
            if stop == self.half:
                for cache in ending:  # a prompt ends here, which methods that wait for its end cannot know
                    if isinstance(cache, CompressedKVCache | _Rivals):
                        cache.end_prefill()


def _kl(p: mx.array, q: mx.array) -> mx.array:
    """KL of rows of log-probabilities ``q`` from ``p``, as a sum of terms that are never negative.

    The usual terms ``p (log p - log q)`` of a small divergence cancel to less than float32 resolves.
    """
    d = q - p
    near = mx.abs(d) < 1
    small = mx.where(near, d, 0)
    return mx.sum(mx.where(near, mx.exp(p) * (mx.expm1(small) - small), mx.exp(q) - mx.exp(p) * (1 + d)), axis=-1)
