"""mlx_lm's three server parts, each with what a compressed cache and an untrusted client need."""

from __future__ import annotations

import logging
import threading
import traceback
from queue import Queue
from typing import Any
from weakref import WeakSet

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache
from mlx_lm.server import ModelProvider, ResponseGenerator

from ..cache.attach import attach
from ..cache.base import ModelConfig, name_of, parts_of
from ..coordinators.reconstruction import remember_tokenizer
from ..core.exceptions import QuantizerConfigError, VeloxError
from .checks import RequestError
from .live import LiveCaches, held
from .metrics import Metrics
from .options import ServeOptions


class Provider(ModelProvider):
    """Loads the model and lets it make compressed caches; ``config`` None leaves its own."""

    def __init__(self, options: ServeOptions, config: ModelConfig | None, live: LiveCaches):
        arguments: Any = options
        super().__init__(arguments)
        self.config, self.live = config, live
        self.method = "none" if config is None else name_of(config)
        self.trimmable, self.vocabulary = True, 0
        self.loaded = threading.Event()
        self.failure: Exception | None = None

    def load_default(self) -> None:
        """Load in the thread that computes; ``loaded`` is set at the end, with or without a ``failure``."""
        try:
            super().load_default()
        except Exception as error:
            self.failure = error
        self.loaded.set()

    def _load(self, *args: Any, **kwargs: Any) -> None:
        super()._load(*args, **kwargs)
        model: Any = self.model
        if self.config is not None:
            attach(model, self.config, serve_standalone=True)
            remember_tokenizer(model, self.tokenizer)
        caches = make_prompt_cache(model)
        self.trimmable = can_trim_prompt_cache(caches)
        if self.draft_model is not None and not self.trimmable:
            raise QuantizerConfigError(
                f"method={self.method!r} cannot be used with a draft model: what it drops cannot be brought back when "
                "a drafted token is refused. Choose a method that keeps all tokens, or serve without a draft model."
            )
        self.is_batchable = self.draft_model is None and all(hasattr(cache, "merge") for cache in caches)
        self.vocabulary = 1 + max(self.tokenizer.get_vocab().values())  # type: ignore[union-attr]
        self.live.watch(model)


class PromptCache(LRUPromptCache):
    """Conversations kept for reuse, as many as ``max_size`` and ``max_bytes`` allow."""

    def __init__(self, max_size: int, max_bytes: int, live: LiveCaches, metrics: Metrics):
        super().__init__(max_size, max_bytes)
        self._live, self._metrics = live, metrics

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """A copy of the best stored cache and the tokens that it lacks: at least one, to have logits to go on from."""
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if cache is not None and not rest:
            cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
            rest = [*rest, tokens[-1]]
        return cache, rest

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        self._live.forget(prompt_cache)
        self._metrics.store(held(prompt_cache))
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)


class Engine(ResponseGenerator):
    """The thread that computes. A request that fails there is answered with an error; the thread goes on."""

    model_provider: Provider
    prompt_cache: PromptCache

    def __init__(self, provider: Provider, prompt_cache: PromptCache):
        self.live = provider.live
        self._waiting: WeakSet[Queue[Any]] = WeakSet()  # where the answers to accepted requests go
        super().__init__(provider, prompt_cache)

    def _generate(self) -> None:
        while not self._stop:
            try:
                super()._generate()
            except Exception as error:
                if self._is_distributed:
                    raise  # the other processes are in the middle of the same step
                # As text: a kept traceback would keep every cache of the failed step.
                logging.error("generation failed, and every request in progress: %s", traceback.format_exc())
                self._fail(str(error))
        self._fail("the server is stopping")

    def _fail(self, reason: str) -> None:
        """End all requests in progress."""
        for queue in list(self._waiting):
            queue.put(VeloxError(f"generation failed: {reason}"))
        self._waiting.clear()

    def _next_request(self, timeout: float | None = None) -> Any:
        self.live.answer()
        request = super()._next_request(timeout)
        if request is not None:
            self._waiting.add(request[0])
        return request

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """mlx_lm's, and every check that needs the model: errors are the request's own here, and everybody's later."""
        try:
            found = super()._tokenize(tokenizer, request, args)
            silent = [word for word in args.stop_words if not tokenizer.encode(word, add_special_tokens=False)]
        except Exception as error:
            raise RequestError(f"no prompt can be made of this request: {error}") from None
        prompt, vocabulary = found[0], self.model_provider.vocabulary
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            raise RequestError("chat_template_kwargs must leave the template's tokens a list")
        if not prompt:
            raise RequestError("the prompt has no tokens; give some text")
        if silent:
            raise RequestError(f"stop: {silent[0]!r} has no tokens for this model; choose another")
        if args.sampling.top_k >= vocabulary:
            raise RequestError(f"top_k={args.sampling.top_k} must be less than {vocabulary}, the tokens of this model")
        if any(token >= vocabulary for token in args.logits.logit_bias or {}):
            raise RequestError(f"logit_bias: token ids must be less than {vocabulary}")
        self._check_capacity(len(prompt), args.max_tokens)
        return found

    def _check_capacity(self, prompt: int, more: int) -> None:
        config = self.model_provider.config
        capacity = None if config is None else parts_of(config)[0].capacity
        if capacity is None or not self.model_provider.trimmable:
            return
        if prompt + more > capacity:
            raise RequestError(
                f"a prompt of {prompt} tokens and max_tokens={more} exceed capacity={capacity}, the most tokens "
                "of a conversation on this server"
            )
