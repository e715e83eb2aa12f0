"""Attention sinks by what makes them: huge values in a few fixed channels of the hidden state, from one layer on.

A short text tells the layer where they appear and the channels, once per model; while the model runs, that layer's
output marks sinks for the caches of the layers after it. Massive activations: Sun et al., arXiv:2402.17762; sinks
predicted from them: KVSink, arXiv:2508.04257.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..attention import forward
from ..cache.exact import NOBODY, first
from ..models.inspect import decoder_blocks, language_models, vocabulary

if TYPE_CHECKING:
    from ..core.abstractions import ArtifactStore
    from ..models.inspect import Slot

# A massive activation is larger than this, than so many medians of the layer, and (our own condition, since some models
# have channels that are large for every token) than so many medians of its channel.
LARGE, MEDIANS, RARE = 100.0, 1000.0, 10.0
# The probe's texts: random tokens, as they are and with each of the first ids, where many models have the token that
# starts a text, in front: some models make no sink of any other.
PROBE_TOKENS, FIRST_IDS = 24, 4
_EMERGENCE = "_veloxquant_emergence"
NONE = "its hidden states have no massive activations"

_found: dict[int, tuple[weakref.ref[Any], Emergence | str]] = {}  # id(model): modules are dicts, so no keys
_probing = threading.local()


@dataclass(frozen=True)
class Emergence:
    """After decoder block ``block``, a sink is a token with one of ``channels`` beyond ``threshold``."""

    block: int
    channels: tuple[int, ...]
    threshold: float


# ---------------------------------------------------------------------------------------------------------- in a model


def prepare(model: Any, slots: Sequence[Slot], store: ArtifactStore | None) -> list[Slot]:
    """``slots`` whose layers know how the hidden state before them tells sinks, or why it does not.

    Sees to it that sinks are marked whenever ``model`` runs. With a ``store`` the probe's result is kept in it.
    """
    blocks = decoder_blocks(model)
    depth = {id(block): i for i, block in enumerate(blocks)}
    own = [id(slot.block) for slot in slots if slot.layer is not None]
    if len(set(own)) < len(own):
        found: Emergence | str = "this model runs its layers more than once"
    else:
        found = emergence(model, slots, store)
    if isinstance(found, Emergence):
        watch(model, found)

    def told(slot: Slot) -> Slot:
        told = found
        if isinstance(found, Emergence) and depth.get(id(slot.block), -1) <= found.block:
            told = f"sinks appear after block {found.block} only"
        return slot if slot.layer is None else replace(slot, layer=replace(slot.layer, emergence=told))

    return [told(slot) for slot in slots]


def watch(model: Any, found: Emergence) -> None:
    """Mark sinks for the caches of a forward of ``model``, as ``found`` tells them."""
    block = decoder_blocks(model)[found.block]
    forward.wrap(type(block), _heard, "sinks")
    forward.install(model, *language_models(model))
    object.__setattr__(block, _EMERGENCE, found)  # no parameter of the module, and copies of it take it along


def mark(marks: mx.array | None, count: int, sinks: mx.array, start: int) -> mx.array:
    """``marks`` ``(B, 1, count)`` with those of new tokens ``sinks`` ``(B, S)`` bool, from position ``start`` on.

    The first ``count`` sinks of a sequence have a place; later ones find none. None: no token came before.
    """
    if marks is None:
        marks = mx.full((sinks.shape[0], 1, count), NOBODY, mx.int32)
    taken = (marks >= 0).sum(axis=-1)
    place = mx.cumsum(sinks.astype(mx.int32), axis=-1) - 1 + taken
    takes = sinks[:, None] & (place[:, None] == mx.arange(count)[:, None])
    return mx.where(takes.any(axis=-1), start + first(takes, axis=-1), marks[:, 0])[:, None]


def _heard(original: Callable) -> Callable:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        probe: Callable | None = getattr(_probing, "hears", None)
        if probe is not None:
            probe(self, out)
        found, sequences = vars(self).get(_EMERGENCE), forward.running()
        if found is not None and sequences:
            _mark_all(found, _hidden(out), sequences)
        return out

    return __call__


def _mark_all(found: Emergence, hidden: mx.array, sequences: list[forward.Share]) -> None:
    """Mark the sinks among the tokens with ``hidden`` states ``(B, S, E)`` in the caches of later layers."""
    listening = [[c for c in share.caches if c.protected and c.layer.emergence == found] for share in sequences]
    if not any(listening):
        return
    large = mx.abs(mx.take(hidden, mx.array(found.channels), axis=-1)).max(axis=-1) > found.threshold
    for share, caches in zip(sequences, listening, strict=True):
        for count in {c.protected for c in caches}:
            mine = [c for c in caches if c.protected == count]
            # Layers of one sequence saw the same tokens: what the first one knows, all know.
            marks = mark(mine[0].store.protected, count, large[share.row, share.tokens], mine[0].offset)
            for cache in mine:
                cache.store.protected = marks


def _hidden(out: Any) -> mx.array:
    return out[0] if isinstance(out, tuple) else out


# ---------------------------------------------------------------------------------------------------------- the probe


def emergence(model: Any, slots: Sequence[Slot], store: ArtifactStore | None = None) -> Emergence | str:
    """Where sinks emerge in ``model``, or why nowhere; found once per model. Never raises on the model's account."""
    known, key = _found.get(id(model)), id(model)
    if known is None or known[0]() is not model:
        known = weakref.ref(model, lambda _: _found.pop(key, None)), _from_store(model, slots, store)
        _found[key] = known
    return known[1]


def _from_store(model: Any, slots: Sequence[Slot], store: ArtifactStore | None) -> Emergence | str:
    if store is None:
        return _probe(model, slots)
    from ..cache.files import fingerprint  # imports mlx_lm, which takes seconds

    # Stores know three kinds of artifact; a codebook is the one that is named freely.
    entry = {"distribution": f"sinks of {fingerprint(model)}", "b": 0, "d": len(slots)}
    if store.exists("codebook", **entry):
        block, threshold, *channels = np.array(store.load_codebook(**entry)).tolist()
        return Emergence(int(block), tuple(map(int, channels)), threshold)
    found = _probe(model, slots)
    if isinstance(found, Emergence):
        store.save_codebook(mx.array([found.block, found.threshold, *found.channels], mx.float32), **entry)
    return found


def _probe(model: Any, slots: Sequence[Slot]) -> Emergence | str:
    """Run a short text through fresh caches of the model's own and look at what every block returns."""
    blocks, size = decoder_blocks(model), vocabulary(model)
    if size is None or not all(isinstance(block, nn.Module) for block in blocks):
        return "the model does not say how many tokens it knows, or its layers are no modules"
    text = np.random.default_rng(0).integers(0, size, (PROBE_TOKENS,))
    ids = np.tile(text, (FIRST_IDS + 1, 1))
    ids[1:, 0] = np.arange(FIRST_IDS) % size
    heard: dict[int, tuple[float, set[tuple[int, int]]]] = {}

    def hear(block: Any, out: Any) -> None:
        heard[id(block)] = massive(np.array(_hidden(out).astype(mx.float32)).reshape(ids.size, -1))

    for cls in {type(block) for block in blocks}:
        forward.wrap(cls, _heard, "sinks")
    _probing.hears = hear
    try:
        runs = (language_models(model) or [model])[-1]
        # To its end: parts of a model that is split over processes wait for each other.
        mx.eval(runs(mx.array(ids), cache=[copy.deepcopy(slot.native) for slot in slots]))
    except Exception as error:  # a model's own code may raise anything; the receipt says what
        return f"it could not be probed: {type(error).__name__}: {error}"
    finally:
        _probing.hears = None
    if any(id(block) not in heard for block in blocks):
        return "not all of its layers ran when it was probed"
    return emerges([heard[id(block)] for block in blocks])


def massive(hidden: np.ndarray) -> tuple[float, set[tuple[int, int]]]:
    """The median magnitude of ``hidden`` ``(T, E)``, and where it is massive: pairs (token, channel)."""
    size = np.abs(hidden)
    median = float(np.median(size))
    tokens, channels = np.nonzero(size > max(LARGE, MEDIANS * median))
    usual = {c: np.median(size[:, c]) for c in set(channels.tolist())}
    pairs = zip(tokens.tolist(), channels.tolist(), strict=True)
    return median, {(t, c) for t, c in pairs if size[t, c] > RARE * usual[c]}


def emerges(layers: list[tuple[float, set[tuple[int, int]]]]) -> Emergence | str:
    """Where massive activations start to last, from what ``massive`` says of every layer; or that they do not.

    Stable channels are massive in most of the layers that have massive activations. They emerge in the first layer
    where a token has one that the next layer keeps [design]: the paper's rule is not known to us in detail.
    """
    counts = Counter(c for _, pairs in layers for c in {c for _, c in pairs})
    some = sum(bool(pairs) for _, pairs in layers)
    stable = tuple(sorted(c for c, n in counts.items() if 2 * n > some))
    for block, ((median, pairs), (_, later)) in enumerate(pairwise(layers)):
        if any(c in stable for _, c in pairs & later):
            return Emergence(block, stable, max(LARGE, MEDIANS * median))
    return NONE
