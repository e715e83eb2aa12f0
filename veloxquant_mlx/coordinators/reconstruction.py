"""The pass in which a model repeats its own context, and the pairs that stay after it (KVzip, arXiv:2505.23416).

The model runs on "repeat the context: <context>" with its full caches and stores nothing: compressed layers are read
through ``View``, the model's own caches (sliding windows, recurrent state) are copied for every chunk.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask

from ..attention.hook import KVHandle
from ..core.exceptions import CacheInputError, CacheStateError, QuantizerConfigError
from ..core.types import is_int
from ..policies.eviction import UNLIMITED
from ..policies.reconstruction import best, peaks, ragged
from .base import Coordinator

if TYPE_CHECKING:
    from ..cache.layer import CompressedKVCache

CHUNK = 2000  # tokens of the context that are repeated at a time, as in the paper's code
OVERLAP = 8  # tokens before a chunk that say where to begin
REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with "
NOT_ASKED = (
    "kvzip: no tokenizer was at hand, so the model repeated its context without being asked to; "
    "give it to remember_tokenizer(model, tokenizer) or prepare_kvzip"
)
IDS = "ids"  # note in ``store.aux`` of the first layer: the tokens of the prompt so far, int32
_PLACE = "VELOXQUANT"  # stands for the user's text in a chat template

_tokenizers: dict[int, tuple[weakref.ref[Any], Any]] = {}  # id(model): modules are dicts, so they cannot be keys


class Wording(NamedTuple):
    """Token ids around the context: both requests, what follows a user's message, what comes before the first."""

    repeat: tuple[int, ...] = ()
    repeat_from: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    head: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, suffix: Sequence[int] | None = None) -> Wording:
        """In the words of ``tokenizer`` and its chat template; without a template the suffix is a line break."""

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()

        head, after = "", "\n"
        if getattr(tokenizer, "has_chat_template", getattr(tokenizer, "chat_template", None) is not None):
            message = [{"role": "user", "content": _PLACE}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            if suffix is None and _PLACE not in text:
                raise CacheInputError(
                    "the chat template does not show a user's message as it is written; pass suffix, the token ids "
                    "that follow such a message."
                )
            head, after = text.partition(_PLACE)[0], text.rpartition(_PLACE)[2]
        return cls(
            encode(REPEAT), encode(REPEAT_FROM), encode(after) if suffix is None else tuple(suffix), encode(head)
        )


def remember_tokenizer(model: Any, tokenizer: Any) -> None:
    """Let kvzip ask ``model`` in the words of ``tokenizer`` whenever it has to; kept for as long as the model lives."""
    key = id(model)
    _tokenizers[key] = weakref.ref(model, lambda _: _tokenizers.pop(key, None)), tokenizer


def wording_for(model: Any) -> Wording:
    """The words for ``model``; none where no tokenizer is known."""
    known = _tokenizers.get(id(model))
    return Wording.of(known[1]) if known is not None and known[0]() is model else Wording()


class View:
    """A cache that is read and left as it is: new rows are attended to, scored and forgotten.

    ``score`` ``(B, H, stop - start)``: the largest weights that stored rows ``start`` to ``stop`` got, from queries
    that see them, the first ``prefix`` rows and their own.
    """

    def __init__(self, cache: CompressedKVCache, prefix: int, start: int, stop: int) -> None:
        self.offset, self.shared = cache.offset, False
        self.score: mx.array | None = None
        self._issued: tuple[mx.array, mx.array] | None = None
        self._cache, self._parts = cache, (prefix, start, stop)
        self._new: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        self._new, self.offset = (keys, values), self.offset + keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        assert self._new is not None, "read before the first update"
        (b, h, _, dk), dv = self._new[0].shape, self._new[1].shape[3]
        shape = (b, h, self.offset)
        return (
            KVHandle(self, "k", (*shape, dk), self._new[0].dtype),
            KVHandle(self, "v", (*shape, dv), self._new[1].dtype),
        )

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Joined anew every time: a copy of every layer that is kept would double the caches."""
        assert self._new is not None, "read before the first update"
        store = self._cache.store
        old = store.keys.dense(), store.values.dense()
        return mx.concatenate([old[0], self._new[0]], axis=2), mx.concatenate([old[1], self._new[1]], axis=2)

    def attend(
        self, queries: mx.array, *, scale: float, mask: mx.array | str | None = None, sinks: mx.array | None = None
    ) -> mx.array:
        keys, values = self.materialize()
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        if self.score is not None:  # layers that share rows: those count that brought them, as in every method
            return out
        (prefix, start, stop), held = self._parts, self.offset - queries.shape[2]
        seen = mx.concatenate([keys[:, :, at] for at in (slice(prefix), slice(start, stop), slice(held, None))], axis=2)
        self.score = peaks(queries, seen, prefix, prefix + stop - start, scale, sinks)
        return mx.depends([out], [self.score])[0]  # layer by layer: queries and keys are freed

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        if window_size is None and (N == 1 or not return_array):
            return None if N == 1 else "causal"
        return create_causal_mask(N, self.offset, window_size=window_size)

    @property
    def keys(self) -> list[mx.array]:
        """The new rows: models that are split by layers hang what they send to others on them."""
        assert self._new is not None, "read before the first update"
        return list(self._new)

    @keys.setter
    def keys(self, arrays: list[mx.array]) -> None:
        self._new = arrays[0], arrays[1]

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return False


def reconstruct(
    model: Any, caches: list[CompressedKVCache], whole: list[Any], ids: np.ndarray, prefix: int, wording: Wording
) -> list[np.ndarray]:
    """Scores ``(H, n)`` float32 of all pairs of ``caches``, which hold the context ``ids`` ``(n,)``.

    They stay as they are. The first ``prefix`` rows score infinity. ``whole`` is the cache list that ``model`` takes.
    """
    scores = [[np.full((cache.store.keys.heads, prefix), np.inf, np.float32)] for cache in caches]
    for start in range(prefix, len(ids), CHUNK):
        stop = min(start + CHUNK, len(ids))
        ask = wording.repeat if start == prefix else (*wording.repeat_from, *ids[max(start - OVERLAP, prefix) : start])
        text = [*ask, *wording.suffix, *ids[start:stop]]
        _check_positions(model, caches, len(ids) + len(text))
        views = {id(cache): View(cache, prefix, start, stop) for cache in caches}
        model(mx.array(np.array(text, np.int32))[None], cache=[views.get(id(c)) or copy.deepcopy(c) for c in whole])
        found = [view.score for view in views.values() if view.score is not None]
        if len(found) < len(caches):
            raise CacheStateError("kvzip: some layers of this model did not attend in the reconstruction pass")
        mx.eval(found, [view.keys for view in views.values()])
        for seen, score in zip(scores, found, strict=True):
            seen.append(np.array(score[0]))
    return [np.concatenate(seen, axis=1) for seen in scores]


def _check_positions(model: Any, caches: list[CompressedKVCache], last: int) -> None:
    """Refuse positions beyond a learned table: a model that turns its keys has no such end."""
    most = getattr(getattr(model, "args", None), "n_positions", None)
    if is_int(most) and last > most and all(cache.layer.rope is None for cache in caches):
        raise CacheStateError(
            f"kvzip repeats the prompt after itself and needs {last} positions; this model has {most}. Use a prompt of "
            "less than half as many tokens, or kvzip_probe='latest'."
        )


@dataclass(frozen=True)
class Reconstruction(Coordinator):
    """Keeps ``budget`` pairs per layer and kv head, the best of all layers and heads, when the first prompt ends.

    Token ids are noted until then. The pass runs before the prompt's last token, which counts as kept; without that
    token (``prepare_kvzip``) after it. The first ``sinks`` tokens stay, and the head of the chat template where it is
    known and leaves room. Nothing is chosen again later.
    """

    budget: int
    sinks: int

    def alone(self) -> None:
        raise QuantizerConfigError(
            "kvzip_probe='context' cannot be used here: it must be 'latest' for a cache without a model, because "
            "'context' lets the model repeat the prompt. Use KVCacheBuilder.for_model(model, config)."
        )

    def before(
        self, model: Any, inputs: mx.array, caches: list[CompressedKVCache], whole: Callable[[], list[Any]]
    ) -> None:
        first = caches[0]
        if first.life.budget is not None:
            return
        if inputs.ndim != 2:
            raise CacheInputError(
                "kvzip lets the model repeat its prompt and needs token ids; embeddings came. Pass ids, or set "
                "kvzip_probe='latest'."
            )
        if inputs.shape[0] > 1:
            raise CacheInputError(
                f"kvzip lets the model repeat one prompt; {inputs.shape[0]} sequences came in one cache. Use caches of "
                "their own (mlx_lm's batches do), or set kvzip_probe='latest'."
            )
        if inputs.shape[1] == 1 and not first.empty():
            self.compress(model, caches, whole(), newest=1)
            return
        aux, new = first.store.aux, inputs[0].astype(mx.int32)
        aux[IDS] = mx.concatenate([aux[IDS], new]) if IDS in aux else new

    def ends(self, caches: list[CompressedKVCache]) -> None:
        """A prompt that has to be cut cannot end here, without the model (``policies.reconstruction`` says so)."""
        if caches[0].life.budget is None and caches[0].offset <= self.budget:
            self._close(caches)

    def compress(
        self,
        model: Any,
        caches: list[CompressedKVCache],
        whole: list[Any],
        newest: int = 0,
        ids: np.ndarray | None = None,
        wording: Wording | None = None,
        prefix: int | None = None,
    ) -> None:
        """Run the pass, unless all fits, and drop what scores least; ``newest`` tokens are still to come.

        ``ids`` are the tokens held, by default those that were noted; ``prefix`` tokens stay in any case.
        """
        held, keep = caches[0].offset, self.budget - newest
        if held > keep:
            ids = np.array(caches[0].store.aux.get(IDS, mx.zeros(0))) if ids is None else ids
            if len(ids) != held:
                raise CacheStateError(
                    f"kvzip knows the ids of {len(ids)} of {held} tokens; the others did not come through this model's "
                    "call. Call prepare_kvzip(model, caches, tokens) with all of them."
                )
            wording = wording_for(model) if wording is None else wording
            stays = self._prefix(ids, wording, keep) if prefix is None else max(prefix, self.sinks)
            scores = reconstruct(model, caches, whole, ids, stays, wording)
            chosen = best(scores, keep * sum(len(score) for score in scores))
            for cache, rows in zip(caches, chosen, strict=True):
                _drop(cache, rows)
                cache.notes = () if wording.repeat else (NOT_ASKED,)
        self._close(caches)

    def _prefix(self, ids: np.ndarray, wording: Wording, most: int) -> int:
        same = 0
        while same < min(len(wording.head), len(ids)) and wording.head[same] == ids[same]:
            same += 1
        return self.sinks if same > most else max(self.sinks, same)

    def _close(self, caches: list[CompressedKVCache]) -> None:
        for cache in caches:
            cache.store.aux.pop(IDS, None)
            cache.life.budget = UNLIMITED


def _drop(cache: CompressedKVCache, chosen: np.ndarray) -> None:
    """Keep the rows ``chosen`` ``(H, n)``; what is dropped is freed before the next layer's turn."""
    cache.settle()
    store, reporter = cache.store, cache.life.reporter
    begun = reporter.begin(store)
    gone = store.n - int(chosen.sum(axis=-1).max())
    store.keep(*ragged(chosen))
    mx.eval(list(store.arrays().values()))
    reporter.tell("evict", gone, begun, store, cache.offset)
