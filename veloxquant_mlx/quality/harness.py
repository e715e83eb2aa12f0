"""mlx_lm's evaluator for lm-eval with compressed caches. Needs lm-eval: ``pip install 'veloxquant-mlx[eval]'``.

``MLXLM`` asks its model for caches everywhere; ``attach`` lets the model make compressed ones. What it feeds at once is
another matter: tokens of one call see each other uncompressed, so that a whole prompt or text in one call would measure
nothing. Here the last token of a prompt goes alone, as in mlx_lm's generation, and texts go in short pieces. The tokens
of an answer that is scored still see each other uncompressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from lm_eval import simple_evaluate  # type: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # type: ignore[reportMissingImports]
from mlx_lm.evaluate import MLXLM
from mlx_lm.models.cache import make_prompt_cache

from ..cache.attach import attach
from ..cache.base import ModelConfig
from ..coordinators.reconstruction import remember_tokenizer
from ..methods._method import refuse


class CompressedLM(MLXLM):
    """``MLXLM`` whose caches are made by ``KVCacheBuilder.for_model(model, config, serve_standalone=True)``.

    ``config`` None leaves the model its own caches, fed in the same way, to compare with. ``piece`` is how many tokens
    of a text without a prompt are fed at once; each piece is ended by a token alone, which lets methods that drop
    tokens at the end of a prompt do so. The other arguments are ``MLXLM``'s. ``close()`` gives the model its own
    caches back.
    """

    def __init__(self, path_or_hf_repo: str, config: ModelConfig | None, piece: int = 256, **kwargs: Any) -> None:
        if piece < 1:
            refuse("piece", piece, "an int >= 1", "Take 256.")
        super().__init__(path_or_hf_repo, **kwargs)
        self.piece = piece
        remember_tokenizer(self._model, self.tokenizer)
        self._attachment = None if config is None else attach(self._model, config, serve_standalone=True)

    def close(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()

    def _process_prompt(self, prompt: Sequence[int], step_size: int = 2048) -> tuple[mx.array, list[Any]]:
        """Log-probabilities ``(1, vocabulary)`` of what follows ``prompt``, and the caches that hold it."""
        cache, last = make_prompt_cache(self._model), len(prompt) - 1
        ids = mx.array(list(prompt))[None]
        for start in range(0, last, step_size):
            self._model(ids[:, start : min(start + step_size, last)], cache=cache)
            mx.eval([c.state for c in cache])
            mx.clear_cache()
        return _logprobs(self._model(ids[:, last:], cache=cache))[:, -1], cache

    def _score_fn(
        self, inputs: Any, cache: list[Any] | None = None, step_size: int = 2048
    ) -> tuple[mx.array, mx.array, mx.array]:
        """``MLXLM._score_fn`` for one text: scores ``(1, S-1)`` of all its tokens but one, S, which were likeliest."""
        (ids,) = inputs
        ids = mx.array(ids)[None]
        cache, scores, greedy = cache or make_prompt_cache(self._model), [], []
        for start, stop in self._pieces(ids.shape[1] - 1):
            found, targets = _logprobs(self._model(ids[:, start:stop], cache=cache)), ids[:, start + 1 : stop + 1]
            scores.append(mx.take_along_axis(found, targets[..., None], axis=-1)[..., 0])
            greedy.append(found.argmax(axis=-1) == targets)
            mx.eval(scores[-1], greedy[-1])
            mx.clear_cache()
        return mx.concatenate(scores, axis=1), mx.array([ids.shape[1]]), mx.concatenate(greedy, axis=1)

    def _pieces(self, n: int) -> Iterator[tuple[int, int]]:
        """``n`` tokens in pieces, a token alone after each that is whole."""
        start = 0
        while start < n:
            stop = min(start + self.piece, n)
            yield start, stop
            if stop < n:
                yield stop, stop + 1
            start = stop + 1

    def loglikelihood_rolling(self, requests: Any) -> list[float]:
        """One text at a time: rows that fill up a batch would be compressed with those of the shorter texts."""
        size, self._batch_size = self._batch_size, 1
        try:
            return super().loglikelihood_rolling(requests)
        finally:
            self._batch_size = size


def _logprobs(logits: mx.array) -> mx.array:
    return nn.log_softmax(logits.astype(mx.float32), axis=-1)


def evaluate(
    path: str,
    config: ModelConfig | None,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    max_tokens: int | None = None,
    use_chat_template: bool | None = None,
    include_path: str | None = None,
    piece: int = 256,
    seed: int = 123,
) -> dict[str, dict[str, Any]]:
    """Run lm-eval's ``tasks`` on the model in ``path``: metrics by task, as lm-eval names them.

    ``include_path``: a folder with further tasks (YAML files). Raises ``QuantizerConfigError`` for unknown tasks.
    """
    manager = TaskManager(include_path=include_path)
    for task in tasks:
        if not manager.match_tasks([task]):
            refuse("tasks", task, "a task of lm-eval", "See: lm_eval ls tasks")
    mx.random.seed(seed)
    lm = CompressedLM(
        path,
        config,
        piece,
        max_tokens=max_tokens,
        batch_size=batch_size,
        use_chat_template=use_chat_template,
    )
    try:
        found = simple_evaluate(
            model=lm,
            tasks=list(tasks),
            task_manager=manager,
            apply_chat_template=lm.use_chat_template,
            num_fewshot=num_fewshot,
            limit=limit,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    finally:
        lm.close()
    return found["results"]
