"""Compressed caches for code that asks the model itself: ``mlx_lm.models.cache.make_prompt_cache(model)``."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from ..core.exceptions import CacheStateError
from .base import KVCacheBuilder, ModelConfig


class Attachment:
    """What ``attach`` returns: ``detach()`` undoes it, and so does leaving it as a context manager."""

    def __init__(self, model: Any, config: ModelConfig, serve_standalone: bool = False):
        if isinstance(vars(model).get("make_cache"), _MakeCache):
            raise CacheStateError("this model is attached already; detach the first attachment before the next")
        # A copy: what the caller changes in the configuration later was never checked.
        make = _MakeCache(weakref.ref(model), copy.deepcopy(config), serve_standalone)
        make()  # what is wrong with the configuration shows here, not at the first request
        self._model, self._make, self._before = weakref.ref(model), make, vars(model).get("make_cache")
        model.make_cache = make

    def detach(self) -> None:
        """Give the model its own caches back. Caches that are in use stay as they are; a second call does nothing."""
        model = self._model()
        if model is not None and vars(model).get("make_cache") is self._make:
            if self._before is None:
                del model.make_cache
            else:
                model.make_cache = self._before

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()


class _MakeCache:
    """``make_cache`` of an attached model: fresh caches at every call, and no second life for the model."""

    def __init__(self, model: weakref.ref[Any], config: ModelConfig, serve_standalone: bool):
        self.model, self.config, self.serve_standalone = model, config, serve_standalone

    def __call__(self) -> list[Any]:
        return KVCacheBuilder.for_model(self.model(), self.config, serve_standalone=self.serve_standalone)


def attach(model: Any, config: ModelConfig, serve_standalone: bool = False) -> Attachment:
    """Let ``model`` make compressed caches by itself: in mlx_lm's server, batches and every ``make_prompt_cache``.

    Each request gets caches of its own. Takes and raises what ``KVCacheBuilder.for_model`` does, at once.

    >>> with attach(model, KVCacheConfig(method="kivi")):  # doctest: +SKIP
    ...     texts = batch_generate(model, tokenizer, prompts)
    """
    return Attachment(model, config, serve_standalone)
