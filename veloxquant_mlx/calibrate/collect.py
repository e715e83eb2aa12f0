"""Runs a model over a text with caches that watch: the real queries (after RoPE), keys and values of every layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_cache

from ..core.exceptions import CacheInputError, QuantizerConfigError
from ..models.inspect import Slot, cache_slots

if TYPE_CHECKING:
    _Base = Any  # mlx_lm has no types
else:
    _Base = mlx_cache.KVCache

Progress = Callable[[int, int], None]
"""Called with tokens done and tokens in all."""

STEP = 512  # tokens of a sequence at a time


@dataclass(frozen=True)
class Call:
    """One attention call: ``queries`` ``(B, Hq, L, D)``, the rows that came with it, and the exact ``output``.

    ``keys`` and ``values`` are the ``L`` new rows ``(B, H, L, D)``; ``queries`` and ``keys`` carry their positions.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    mask: mx.array | str | None
    sinks: mx.array | None
    output: mx.array


class Watched(_Base):
    """mlx_lm's own cache, which shows every attention call to ``watch`` and answers it exactly."""

    def __init__(self, watch: Callable[[Call], None]) -> None:
        super().__init__()
        self.shared = False
        self._watch = watch
        self._issued: tuple[mx.array, mx.array] | None = None
        self._new: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._new = keys, values
        issued: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)
        self._issued = issued
        return issued

    def attend(
        self, queries: mx.array, *, scale: float, mask: mx.array | str | None = None, sinks: mx.array | None = None
    ) -> mx.array:
        assert self._issued is not None, "the seam calls for arrays that this cache issued"
        keys, values = self._issued
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        if self._new is not None:  # later readers of shared rows are other layers
            new, self._new = self._new, None
            self._watch(Call(queries, *new, scale, mask, sinks, out))
        return out

    def materialize(self) -> tuple[mx.array, mx.array]:
        assert self._issued is not None, "nothing was issued yet"
        return self._issued


def hooked_slots(model: Any) -> list[Slot]:
    """The entries of the cache list that methods are applied to; ``QuantizerConfigError`` if one hides its queries."""
    slots = [slot for slot in cache_slots(model) if slot.layer is not None]
    blind = [slot.index for slot in slots if slot.hooked is False]
    if blind or not slots:
        what = f"the attention of cache entries {blind} does not go through mlx_lm's shared attention function"
        raise QuantizerConfigError(
            f"model={type(model).__name__} cannot be calibrated: {what if blind else 'it has no full-attention layer'}."
            " Calibrate a model whose layers call scaled_dot_product_attention of mlx_lm."
        )
    return slots


def watched(model: Any, watch: Mapping[int, Callable[[Call], None]]) -> list[Any]:
    """A fresh cache list: ``watch`` sees the calls of the entries that it names, the others are the model's own."""
    return [Watched(watch[slot.index]) if slot.index in watch else slot.native for slot in cache_slots(model)]


@dataclass(frozen=True)
class Sample:
    """What the layer at entry ``index`` saw at ``positions`` ``(M,)``, in the model's dtype; only the asked parts.

    ``queries`` ``(Hq, M, D)`` and ``keys`` ``(H, M, D)`` after RoPE, ``values`` ``(H, M, Dv)``. Where other layers read
    the same rows, the queries are those of the first.
    """

    index: int
    kv_heads: int
    positions: np.ndarray
    parts: Mapping[str, mx.array]

    def numpy(self, name: str) -> np.ndarray:
        """A part in float64."""
        return np.array(self.parts[name].astype(mx.float32), dtype=np.float64)


class _Keeper:
    """Keeps the asked parts of the drawn tokens of one layer."""

    def __init__(self, wants: Sequence[str]) -> None:
        self.chunks: dict[str, list[mx.array]] = {name: [] for name in wants}
        self.kv_heads = 0
        self.rows = np.zeros(0, np.int32)  # of the present chunk

    def __call__(self, call: Call) -> None:
        self.kv_heads = call.keys.shape[1]
        for name, chunks in self.chunks.items():
            part: mx.array = getattr(call, name)
            chunks.append(mx.take(part[0], mx.array(self.rows), axis=1))

    def sample(self, index: int, positions: np.ndarray) -> Sample:
        parts = {name: mx.concatenate(chunks, axis=1) for name, chunks in self.chunks.items()}
        mx.eval(list(parts.values()))
        return Sample(index, self.kv_heads, positions, parts)


def collect(
    model: Any,
    sequences: Sequence[Sequence[int]],
    wants: Sequence[str] = ("queries", "keys", "values"),
    *,
    limit: int = 3000,
    seed: int = 42,
    progress: Progress | None = None,
) -> dict[int, Sample]:
    """At most ``limit`` tokens of ``sequences``, drawn evenly, as every full-attention layer sees them.

    The same tokens for all layers, by entry of the cache list. Every sequence starts at position 0 with fresh caches.
    ``wants`` names the parts to keep: that many numbers are held per token and layer. The model is not changed.
    """
    total = sum(map(len, sequences))
    if not total:
        raise CacheInputError("the calibration text has no tokens. Give a longer one.")
    keepers = {slot.index: _Keeper(wants) for slot in hooked_slots(model)}
    drawn = np.sort(np.random.default_rng(seed).choice(total, min(limit, total), replace=False))
    positions: list[np.ndarray] = []
    done = 0
    for sequence in sequences:
        caches = watched(model, keepers)
        for start in range(0, len(sequence), STEP):
            chunk = sequence[start : start + STEP]
            inside = (drawn[(drawn >= done) & (drawn < done + len(chunk))] - done).astype(np.int32)
            positions.append(inside + start)
            for keeper in keepers.values():
                keeper.rows = inside
            model(mx.array(list(chunk))[None], cache=caches)  # no logits: only what is evaluated is computed
            mx.eval([cache.state for cache in caches], [list(k.chunks.values()) for k in keepers.values()])
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    where = np.concatenate(positions)
    return {index: keeper.sample(index, where) for index, keeper in keepers.items()}


def sequences_of(tokenizer: Any, text: str, length: int = 2048, most: int = 20) -> list[list[int]]:
    """The text as sequences of ``length`` tokens, each with the tokenizer's first token where it puts one in front.

    What is left at the end counts only where it is all there is; at most ``most`` sequences.
    """
    tokens = list(tokenizer.encode(text))
    bos = getattr(tokenizer, "bos_token_id", None)
    head = tokens[:1] if tokens and bos is not None and tokens[0] == bos else []
    body, step = tokens[len(head) :], max(length - len(head), 1)
    pieces = [body[start : start + step] for start in range(0, len(body), step)]
    if len(pieces) > 1 and len(pieces[-1]) < step:
        pieces.pop()
    return [head + piece for piece in pieces[:most]]
