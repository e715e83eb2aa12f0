"""Speculative decoding with a draft model: rejected drafts are trimmed, and the tokens are those of a run without."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm import stream_generate
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from tests.matrix import Row
from tests.models import tiny
from tests.models.running import (
    DROPPING,
    FIRST,
    QUANTISED,
    caches_of,
    decode,
    fine,
    greedy,
    prefill,
    tolerance,
    word_tokenizer,
)
from veloxquant_mlx.cache.layer import CompressedKVCache

N = 24


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.build("llama")


def draft(noise: float) -> Any:
    """The model itself with noise on its weights: part of its tokens are right."""
    model = tiny.build("llama")
    mx.random.seed(3)
    model.update(tree_map(lambda a: a + noise * mx.std(a) * mx.random.normal(a.shape), model.parameters()))
    return model


def speculate(model: Any, drafts: Any, prompt: mx.array, caches: list[Any], **kwargs: Any) -> tuple[list[int], int]:
    """Tokens and how many of them the draft model gave."""
    caches = [*caches, *make_prompt_cache(drafts)]
    kwargs = {"max_tokens": N, "num_draft_tokens": 3} | kwargs
    steps = [
        (int(t), own) for t, _, own in speculative_generate_step(prompt, model, drafts, prompt_cache=caches, **kwargs)
    ]
    return [t for t, _ in steps], sum(own for _, own in steps)


@pytest.mark.covers("speculative")
@pytest.mark.parametrize("row", QUANTISED, ids=lambda r: r.id)
@pytest.mark.parametrize("noise", [0.0, 0.15, 5.0], ids=["same", "near", "wrong"])
def test_same_tokens(row: Row, noise: float, llama: Any) -> None:
    """All drafts right, some, nearly none; the cache ends within the text, or one token after it.

    A verified token is computed together with the drafts after it, over rows that a run without a draft has encoded by
    then; at many bits that shifts no token.
    """
    prompt, caches = tiny.tokens(150)[0], caches_of(llama, row, **fine(row))
    expected, _ = greedy(llama, prompt, N, prompt_cache=caches_of(llama, row, **fine(row)))
    tokens, accepted = speculate(llama, draft(noise), prompt, caches)
    assert tokens == expected and len(set(tokens)) > 5
    assert {0.0: accepted >= 16, 0.15: 4 <= accepted <= 16, 5.0: accepted <= 4}[noise]
    assert {c.offset for c in caches} <= {150 + N - i for i in range(3)}  # mlx_lm's own count at the end of a round


@pytest.mark.parametrize("length", range(58, 70))
@pytest.mark.parametrize("k", [1, 4, 9])
def test_every_boundary_of_blocks(length: int, k: int, llama: Any) -> None:
    """kivi with blocks of 32: rounds of k drafts that end before, on and after a seal, and are taken back over it."""
    row, prompt = FIRST["kivi"], tiny.tokens(length, seed=length)[0]
    fields = {"bit_width_inlier": 8, "residual_length": 32}
    expected, _ = greedy(llama, prompt, N, prompt_cache=caches_of(llama, row, **fields))
    tokens, _ = speculate(llama, draft(0.15), prompt, caches_of(llama, row, **fields), num_draft_tokens=k)
    assert tokens == expected


@pytest.mark.covers("trim")
@pytest.mark.parametrize("row", QUANTISED, ids=lambda r: r.id)
def test_rounds_of_any_size_are_taken_back(row: Row, llama: Any) -> None:
    """``trim_prompt_cache`` after every step: the same logits as without, from a cache that never saw the tokens."""
    caches, plain = caches_of(llama, row, **fine(row)), caches_of(llama, row, **fine(row))
    for c in (caches, plain):
        prefill(llama, c, tiny.tokens(120), 64)
    for i in range(20):
        wrong = tiny.tokens(1 + i % 7, seed=50 + i)
        decode(llama, caches, wrong)
        assert can_trim_prompt_cache(caches) and trim_prompt_cache(caches, wrong.shape[1]) == wrong.shape[1]
        token = tiny.tokens(1, seed=i)
        np.testing.assert_allclose(decode(llama, caches, token), decode(llama, plain, token), atol=tolerance(row))
    assert {c.offset for c in caches} == {c.offset for c in plain} == {140}


@pytest.mark.parametrize("row", QUANTISED, ids=lambda r: r.id)
def test_compressed_draft(row: Row, llama: Any) -> None:
    """The draft model's caches may be compressed too: what it guesses changes no token."""
    prompt, drafts = tiny.tokens(150)[0], draft(0.15)
    expected, _ = greedy(llama, prompt, N, prompt_cache=caches_of(llama, row, **fine(row)))
    caches = [*caches_of(llama, row, **fine(row)), *caches_of(drafts, row)]
    steps = speculative_generate_step(prompt, llama, drafts, prompt_cache=caches, max_tokens=N, num_draft_tokens=3)
    assert [int(token) for token, _, _ in steps] == expected


@pytest.mark.covers("speculative", cell="no: drops tokens")
@pytest.mark.covers("trim", cell="no: drops tokens")
@pytest.mark.parametrize("row", DROPPING, ids=lambda r: r.id)
def test_refused_before_the_first_token(row: Row, llama: Any) -> None:
    caches = [*caches_of(llama, row), *make_prompt_cache(llama)]
    assert not can_trim_prompt_cache(caches[: len(llama.layers)]) and trim_prompt_cache(caches, 1) == 0
    prompt = tiny.tokens(9)[0]
    with pytest.raises(ValueError, match="requires a trimmable prompt cache.*CompressedKVCache"):
        list(stream_generate(llama, word_tokenizer(), prompt, draft_model=llama, prompt_cache=caches))
    assert all(c.empty() for c in caches)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_other_layers_of_a_hybrid_decide_too(name: str) -> None:
    """Sliding layers can be rolled back until they wrap, recurrent ones never: as mlx_lm says of its own caches."""
    model, row = tiny.build(name), FIRST["turboquant_rvq"]
    caches, stock = caches_of(model, row), make_prompt_cache(model)
    assert any(isinstance(c, CompressedKVCache) for c in caches)
    assert can_trim_prompt_cache(caches) == can_trim_prompt_cache(stock) == (name == "gemma3_text")
    prefill(model, caches, tiny.tokens(40), 16)
    prefill(model, stock, tiny.tokens(40), 16)
    assert not can_trim_prompt_cache(caches) and not can_trim_prompt_cache(stock)
