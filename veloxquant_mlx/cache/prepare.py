"""Explicit preparation of caches for a context that many questions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..coordinators.reconstruction import IDS, Reconstruction, Wording, wording_for
from ..core.exceptions import CacheInputError, CacheStateError
from .layer import CompressedKVCache

STEP = 2048  # tokens of a context at a time, as in mlx_lm


def prepare_kvzip(
    model: Any,
    caches: Sequence[Any],
    tokens: Sequence[int] | mx.array,
    tokenizer: Any = None,
    *,
    suffix: Sequence[int] | None = None,
    prefix: int | None = None,
) -> None:
    """Compress caches that hold exactly the context ``tokens`` by KVzip; questions that follow are only added.

    ``caches`` is the list of ``for_model(model, KVCacheConfig(method="kvzip"))``; where it is empty the context is fed
    first. The ``tokenizer`` words the request to repeat, by its chat template; ``suffix`` overrides the ids between
    request and reply, ``prefix`` the number of first tokens that always stay. Without a tokenizer (here or in
    ``remember_tokenizer``) the context is repeated unasked, and the receipt says so. Within the budget nothing is run.

    Raises CacheInputError for other caches or tokens, CacheStateError for caches whose prompt has ended already.

    >>> prepare_kvzip(model, caches, tokenizer.encode(document), tokenizer)  # doctest: +SKIP
    >>> text = generate(model, tokenizer, question, prompt_cache=copy.deepcopy(caches))  # doctest: +SKIP
    """
    whole = list(caches)
    ours = [cache for cache in whole if isinstance(cache, CompressedKVCache)]
    policy = ours[0].coordinator if ours else None
    if not isinstance(policy, Reconstruction) or any(cache.coordinator != policy for cache in ours):
        raise CacheInputError(
            "caches were not made for a reconstruction pass; pass the list of for_model(model, "
            "KVCacheConfig(method='kvzip')), with kvzip_probe='context'."
        )
    ids = np.array(tokens).reshape(-1).astype(np.int32)
    if len(ids) == 0 or (prefix is not None and not 0 <= prefix <= min(policy.budget, len(ids))):
        raise CacheInputError(
            f"prefix={prefix} of {len(ids)} tokens with kvzip_budget={policy.budget}; valid: at least one token, and a "
            "prefix within both."
        )
    if any(cache.life.budget is not None for cache in ours):
        raise CacheStateError("these caches are prepared, or past their first prompt; start new ones for this context")
    if all(cache.empty() for cache in ours):
        for part in np.array_split(ids, -(-len(ids) // STEP)):  # never one token alone, which would end the prompt
            model(mx.array(part)[None], cache=whole)
            mx.eval([cache.state for cache in whole])
    noted = ours[0].store.aux.get(IDS)
    if any(cache.offset != len(ids) for cache in ours) or (
        noted is not None and not np.array_equal(np.array(noted), ids)
    ):
        raise CacheInputError(
            f"tokens: {len(ids)} ids that are not what the caches hold ({ours[0].offset} tokens). Pass the ids that "
            "the model was fed, all of them."
        )
    if ours[0].batch_size > 1:
        raise CacheInputError(f"caches hold {ours[0].batch_size} sequences; prepare_kvzip takes one at a time")
    wording = wording_for(model) if tokenizer is None else Wording.of(tokenizer, suffix)
    if suffix is not None:
        wording = wording._replace(suffix=tuple(suffix))
    policy.compress(model, ours, whole, ids=ids, wording=wording, prefix=prefix)
    for cache in ours:
        cache.end_prefill()
