"""KVzip on whole models: the reconstruction pass against numpy, the automatic and the explicit way, chats, files."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import batch_generate
from mlx_lm.models.cache import KVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from typer.testing import CliRunner

from tests.matrix import identical, same_state
from tests.models import tiny
from tests.models.running import decode, greedy, lively, prefill, token_list, word_tokenizer
from tests.parts.test_kvzip import oracle
from veloxquant_mlx import (
    CacheInputError,
    CacheStateError,
    KVCacheBuilder,
    KVCacheConfig,
    attach,
    cache_report,
    load_cache,
    prepare_kvzip,
    save_cache,
)
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cli import app, generate
from veloxquant_mlx.coordinators import reconstruction
from veloxquant_mlx.coordinators.reconstruction import Wording, remember_tokenizer
from veloxquant_mlx.policies.reconstruction import best

BUDGET, PROMPT, SINKS = 40, 100, 4
MODELS = ("llama", "qwen3", "gemma3_text", "qwen3_next", "gpt_oss", "deepseek_v2")


class Letters:
    """A tokenizer of single characters with a chat template."""

    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) % 128 for c in text]

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt and not tokenize
        return f"<s>user:{messages[0]['content']}</s>bot:"


WORDING = Wording.of(Letters())


@pytest.fixture
def chunks_of_40(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reconstruction, "CHUNK", 40)
    yield


def caches_of(model: Any, **fields: Any) -> list[Any]:
    return KVCacheBuilder.for_model(model, KVCacheConfig(**{"method": "kvzip", "kvzip_budget": BUDGET, **fields}))


def ours(caches: list[Any]) -> list[CompressedKVCache]:
    return [cache for cache in caches if isinstance(cache, CompressedKVCache)]


def kept(cache: CompressedKVCache) -> list[list[int]]:
    return [sorted(p for p in head if p >= 0) for head in np.array(cache.positions[0]).tolist()]


def attentions(model: Any, ids: list[int]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Queries, keys and sinks of the full-attention layers in one plain run over ``ids``, our caches left out.

    Queries are scaled as if their attention had the usual scale.
    """
    layers: list[Any] = []
    module: Any = sys.modules[type(model).__module__]
    original = module.scaled_dot_product_attention

    def spy(q: mx.array, k: mx.array, v: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        names = dict(zip(("cache", "scale"), args, strict=False)) | kwargs
        if type(names["cache"]) is KVCache:
            layers.append((q * names["scale"] * q.shape[-1] ** 0.5, k, names.get("sinks")))
        return original(q, k, v, *args, **kwargs)

    caches = make_prompt_cache(model)
    module.scaled_dot_product_attention = spy
    try:
        mx.eval(model(mx.array([ids]), cache=caches))
    finally:
        module.scaled_dot_product_attention = original
    return [
        (np.array(q[0], np.float64), np.array(k[0], np.float64), None if sinks is None else np.array(sinks))
        for q, k, sinks in layers
    ]


def expected(model: Any, context: list[int], prefix: int, chunk: int, wording: Wording) -> list[np.ndarray]:
    """Scores per layer by the specification: one plain run per chunk, no cache that is read twice, float64 softmax."""
    parts: list[list[np.ndarray]] = []
    for start in range(prefix, len(context), chunk):
        stop = min(start + chunk, len(context))
        ask = wording.repeat if start == prefix else wording.repeat_from + tuple(context[start - 8 : start])
        x = [*ask, *wording.suffix, *context[start:stop]]
        found = []
        for q, k, sinks in attentions(model, [*context, *x]):
            sub = np.concatenate([k[:, :prefix], k[:, start:stop], k[:, -len(x) :]], axis=1)
            found.append(oracle(q[:, -len(x) :], sub, prefix, prefix + stop - start, sinks))
        parts.append(found)
    return [
        np.concatenate([np.full((len(layer[0]), prefix), np.inf), *layer], axis=1) for layer in zip(*parts, strict=True)
    ]


def everything(caches: list[Any]) -> list[mx.array]:
    return [leaf * 1 for _, leaf in tree_flatten([c.state for c in caches]) if isinstance(leaf, mx.array)]


# --------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.usefixtures("chunks_of_40")
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_untouched_caches(name: str) -> None:
    """Three chunks; sliding and recurrent layers get copies; nothing that a cache holds has changed afterwards."""
    model, context = tiny.build(name), token_list(PROMPT)
    caches = caches_of(model)
    model(mx.array([context]), cache=caches)
    before = everything(caches)
    scores = reconstruction.reconstruct(model, ours(caches), caches, np.array(context), SINKS, WORDING)
    assert all(identical(a, b) for a, b in zip(before, everything(caches), strict=True))
    assert [c.offset for c in ours(caches)] == [PROMPT] * len(scores)
    want = expected(model, context, SINKS, 40, WORDING)
    assert len(scores) == len(want) == len(ours(caches))
    for got, exact in zip(scores, want, strict=True):
        assert got.dtype == np.float32 and got.shape == exact.shape and np.isinf(got[:, :SINKS]).all()
        assert (got > 0).all() and (got[:, SINKS:] <= 1).all()
        # The specification's bound; float32 sums in another order give about 1e-6.
        assert np.allclose(got[:, SINKS:], exact[:, SINKS:], atol=1e-4)


# ------------------------------------------------------------------------------------------------------ automatic way


@pytest.mark.usefixtures("chunks_of_40")
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_generate_step(name: str) -> None:
    """The best pairs of all layers stay, the prompt's last token among the budget, however the prompt was fed."""
    model, ids = tiny.build(name), tiny.tokens(PROMPT)
    remember_tokenizer(model, Letters())
    context = token_list(PROMPT)[:-1]
    scores = [s.astype(np.float32) for s in expected(model, context, SINKS, 40, WORDING)]
    want = [
        [[*np.flatnonzero(head).tolist(), PROMPT - 1] for head in layer]
        for layer in best(scores, (BUDGET - 1) * sum(len(s) for s in scores))
    ]
    full = make_prompt_cache(model)
    prefill(model, full, ids, 512)
    for step in (9, 33, 512):  # none leaves a step of one token, which would end the prompt
        caches = caches_of(model)
        prefill(model, caches, ids, step)
        assert [kept(cache) for cache in ours(caches)] == want
        assert len({len(head) for layer in want for head in layer}) > 2
        plain: Any = [c for c in full if type(c) is KVCache]
        for cache, uncompressed in zip(ours(caches), plain, strict=True):
            assert not cache.describe()["notes"] and cache.offset == PROMPT and not cache.is_trimmable()
            at = mx.maximum(cache.positions, 0)[..., None]
            for rows, own in zip(cache.materialize(), (uncompressed.keys, uncompressed.values), strict=True):
                same = mx.take_along_axis(own, at, axis=2) == rows
                # Bit for bit, but for the last token, which attended to what was left, and chunks (another order).
                old = (cache.positions >= 0) & (cache.positions < PROMPT - 1)
                assert step != 512 or bool((same.all(-1) | ~old).all())
    tokens, _ = greedy(model, ids[0], 5, prompt_cache=caches_of(model), sampler=lively)
    again, _ = greedy(model, ids[0], 5, prompt_cache=caches_of(model), prefill_step_size=9, sampler=lively)
    assert tokens == again


def test_within_the_budget_no_pass_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the uncompressed cache, also when later turns outgrow the budget: nothing is scored again."""
    monkeypatch.setattr(reconstruction, "reconstruct", None)
    model, ids = tiny.build("llama"), tiny.tokens(PROMPT)
    caches, stock = caches_of(model), make_prompt_cache(model)
    for part in (ids[:, :BUDGET], ids[:, BUDGET:]):
        assert np.array_equal(prefill(model, caches, part, 16), prefill(model, stock, part, 16))
    assert [cache.store.n for cache in caches] == [PROMPT] * 2 and not any(c.store.aux for c in caches)


def test_later_turns_only_add() -> None:
    model, ids = tiny.build("qwen3"), tiny.tokens(PROMPT + 60)
    caches = caches_of(model)
    prefill(model, caches, ids[:, :PROMPT], 32)
    first = [kept(cache) for cache in caches]
    assert sum(len(head) for layer in first for head in layer) == BUDGET * 4
    prefill(model, caches, ids[:, PROMPT:], 32)
    assert [kept(c) for c in caches] == [[[*h, *range(PROMPT, PROMPT + 60)] for h in layer] for layer in first]
    # Heads of different lengths are padded to the longest, which is held and counted; so are their positions.
    for cache, layer in zip(caches, first, strict=True):
        rows = max(map(len, layer)) + 60
        assert cache.nbytes - cache.held_bytes()["fixed"] == 2 * (-(-rows // 64) * 64 * 2 * 32 * 4 + rows * 4)


@pytest.mark.parametrize("fed", [60, PROMPT], ids=["in the prompt", "after it"])
def test_copies_and_files(fed: int, tmp_path: Path) -> None:
    model, ids = tiny.build("llama"), tiny.tokens(PROMPT + 60)
    remember_tokenizer(model, Letters())
    caches = caches_of(model)
    if fed < PROMPT:
        model(ids[:, :fed], cache=caches)
    else:
        prefill(model, caches, ids[:, :fed], 32)
    mx.eval([cache.state for cache in caches])
    twins = copy.deepcopy(caches)
    save_prompt_cache(str(tmp_path / "a.safetensors"), caches)
    save_cache(tmp_path / "b.safetensors", caches, model)
    loaded: list[Any] = [
        load_prompt_cache(str(tmp_path / "a.safetensors")),
        load_cache(tmp_path / "b.safetensors", model),
    ]
    outs = []
    for some in (caches, twins, *loaded):
        prefill(model, some, ids[:, fed:PROMPT] if fed < PROMPT else ids[:, PROMPT:], 32)
        outs.append(decode(model, some, ids[:, :5]))
        assert all(same_state(a, b) for a, b in zip(caches, some, strict=True)) or some is not caches
    assert all(np.array_equal(outs[0], out) for out in outs)
    rows = sum(len(head) for cache in loaded[0] for head in kept(cache))
    assert rows == 4 * (BUDGET + 5 + (0 if fed < PROMPT else 60))


def test_batches_are_as_single_runs() -> None:
    """Every sequence repeats its own prompt; the model's own caches of a batch are copied for it."""
    for name in ("llama", "gemma3_text"):
        model, prompts = tiny.build(name), [token_list(PROMPT, seed=1), token_list(63, seed=2), token_list(20, seed=3)]
        singles = []
        for prompt in prompts:
            caches = caches_of(model)
            singles.append((greedy(model, mx.array(prompt), 8, prompt_cache=caches, sampler=lively)[0], caches))
        with attach(model, KVCacheConfig(method="kvzip", kvzip_budget=BUDGET)):
            out: Any = batch_generate(
                model,
                word_tokenizer(),
                prompts,
                max_tokens=8,
                return_prompt_caches=True,
                return_token_ids=True,
                sampler=lively,
            )
        assert out.token_ids == [tokens for tokens, _ in singles]
        for got, (_, own) in zip(out.caches, singles, strict=True):
            for a, b in zip(ours(got), ours(own), strict=True):
                assert all(x[: len(y)] == y[: len(x)] for x, y in zip(kept(a), kept(b), strict=True))


@pytest.mark.parametrize("packing", ["kivi", "turboquant_rvq"])
def test_kept_pairs_are_packed(packing: Any) -> None:
    model, ids = tiny.build("llama"), tiny.tokens(250)
    fields: dict[str, Any] = {"residual_length": 32} if packing == "kivi" else {}
    both = [KVCacheConfig(method="kvzip", kvzip_budget=96), KVCacheConfig(method=packing, **fields)]
    caches, single = KVCacheBuilder.for_model(model, both), caches_of(model, kvzip_budget=96)
    for some in (caches, single):
        prefill(model, some, ids, 64)
    assert [kept(a) for a in caches] == [kept(b) for b in single]
    report = cache_report(caches)
    assert all(layer.packed for layer in report.layers) and report.nbytes < cache_report(single).nbytes
    prepared = KVCacheBuilder.for_model(model, both)
    prepare_kvzip(model, prepared, ids[0])
    assert all(layer.packed for layer in cache_report(prepared).layers)


def test_what_cannot_be_repeated_is_refused() -> None:
    model = tiny.build("llama")
    with pytest.raises(CacheInputError, match="needs token ids; embeddings came.*latest"):
        model(tiny.tokens(4), cache=caches_of(model), input_embeddings=mx.zeros((1, 4, 64)))
    with pytest.raises(CacheInputError, match="one prompt; 2 sequences came"):
        model(mx.zeros((2, 4), mx.int32), cache=caches_of(model))
    caches = caches_of(model)
    model(tiny.tokens(50), cache=caches)
    with pytest.raises(CacheStateError, match="end_prefill"):
        caches[0].end_prefill()
    caches = caches_of(model)
    model.model(tiny.tokens(50), cache=caches)  # past the call that for_model made ready
    with pytest.raises(CacheStateError, match="knows the ids of 0 of 50 tokens.*prepare_kvzip"):
        model(tiny.tokens(1), cache=caches)
    learned = tiny.build("gpt2")  # a table of 256 positions
    caches = caches_of(learned)
    with pytest.raises(CacheStateError, match=r"needs 294 positions; this model has 256"):
        prefill(learned, caches, tiny.tokens(150), 150)


def test_end_prefill_of_a_prompt_that_fits() -> None:
    model, ids = tiny.build("llama"), tiny.tokens(PROMPT)
    caches = caches_of(model)
    model(ids[:, :BUDGET], cache=caches)
    for cache in caches:
        cache.end_prefill()
    prefill(model, caches, ids[:, BUDGET:], 20)
    assert [cache.store.n for cache in caches] == [PROMPT] * 2


# ------------------------------------------------------------------------------------------------------- explicit way


@pytest.mark.parametrize("fed", [False, True])
def test_prepare(fed: bool) -> None:
    """All tokens are scored, ``BUDGET`` pairs stay on average; any number of questions can follow."""
    model, context = tiny.build("qwen3"), token_list(PROMPT)
    caches = caches_of(model)
    if fed:
        for part in (context[:64], context[64:]):
            model(mx.array([part]), cache=caches)
    prepare_kvzip(model, caches, context, Letters())
    scores = [s.astype(np.float32) for s in expected(model, context, SINKS, 2000, WORDING)]
    want = [[np.flatnonzero(h).tolist() for h in layer] for layer in best(scores, BUDGET * 4)]
    assert [kept(cache) for cache in caches] == want and not caches[0].describe()["notes"]
    for seed in (1, 2):
        asked = copy.deepcopy(caches)
        prefill(model, asked, tiny.tokens(30, seed), 16)
        assert [kept(c) for c in asked] == [[[*h, *range(PROMPT, PROMPT + 30)] for h in layer] for layer in want]
    with pytest.raises(CacheStateError, match="are prepared"):
        prepare_kvzip(model, caches, context)


def test_words_and_prefix_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suffix and prefix are used; without a tokenizer the receipt says so; so does a loaded copy's."""
    model, context = tiny.build("llama"), token_list(PROMPT)
    texts: list[Any] = []
    ways: list[Any] = [(Letters(), {}), (Letters(), {"suffix": [9, 9], "prefix": 30}), (None, {"suffix": [7]})]
    original = reconstruction.reconstruct

    def spy(model: Any, caches: Any, whole: Any, ids: Any, prefix: int, wording: Wording) -> Any:
        texts.append((prefix, wording))
        return original(model, caches, whole, ids, prefix, wording)

    monkeypatch.setattr(reconstruction, "reconstruct", spy)
    found, caches = [], []
    for tokenizer, fields in ways:
        caches = caches_of(model)
        prepare_kvzip(model, caches, context, tokenizer, **fields)
        found.append([kept(cache) for cache in caches])
    assert texts[0] == (4, WORDING)
    assert texts[1] == (30, WORDING._replace(suffix=(9, 9)))
    assert texts[2] == (4, Wording(suffix=(7,)))
    assert all(head[:30] == list(range(30)) for layer in found[1] for head in layer)
    assert found[0] != found[2]
    assert "without being asked" in str(cache_report(caches))
    assert "without being asked" in str(cache_report([type(c).from_state(c.state) for c in copy.deepcopy(caches)]))
    # The head of the template stays where the prompt begins with it, unless it takes the whole budget.
    ids = [*WORDING.head, *token_list(PROMPT)]
    remember_tokenizer(model, Letters())
    prefill(model, caches_of(model), mx.array([ids]), 200)
    prefill(model, caches_of(model, kvzip_budget=8), mx.array([ids]), 200)
    assert [prefix for prefix, _ in texts[3:]] == [len(WORDING.head), 4] and texts[3][1] == WORDING


def test_wording() -> None:
    def encode(text: str) -> tuple[int, ...]:
        return tuple(Letters().encode(text, add_special_tokens=False))

    assert WORDING.repeat == encode("\n\nRepeat the previous context exactly.")
    assert WORDING.repeat_from == encode("\n\nRepeat the part of the previous context exactly, starting with ")
    assert (WORDING.head, WORDING.suffix) == (encode("<s>user:"), encode("</s>bot:"))
    plain: Any = SimpleNamespace(encode=Letters().encode, chat_template=None)
    assert Wording.of(plain).suffix == encode("\n") and Wording.of(plain).head == ()
    hidden: Any = SimpleNamespace(encode=Letters().encode, chat_template="x", apply_chat_template=lambda *a, **k: "hi")
    with pytest.raises(CacheInputError, match="pass suffix"):
        Wording.of(hidden)
    assert Wording.of(hidden, [3]).suffix == (3,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "of 0 tokens"),
        ({"prefix": BUDGET + 1}, f"prefix={BUDGET + 1} of {PROMPT} tokens with kvzip_budget={BUDGET}"),
        ({"tokens": token_list(PROMPT)[:-1]}, f"{PROMPT - 1} ids that are not what the caches hold"),
        ({"tokens": token_list(PROMPT, seed=9)}, "ids that are not what the caches hold"),
        ({"caches": []}, "not made for a reconstruction pass"),
        ({"method": "latest"}, "not made for a reconstruction pass"),
    ],
)
def test_prepare_refuses(change: dict[str, Any], message: str) -> None:
    model = tiny.build("llama")
    caches = caches_of(model, **({"kvzip_probe": "latest"} if "method" in change else {}))
    model(tiny.tokens(PROMPT), cache=caches)
    given = {"caches": caches, "tokens": token_list(PROMPT), **change}
    given.pop("method", None)
    with pytest.raises(CacheInputError, match=message):
        prepare_kvzip(model, **given)
    assert all(cache.store.n == PROMPT for cache in caches)


def test_a_model_can_go() -> None:
    """A tokenizer is remembered for as long as its model lives."""
    model = tiny.build("llama")
    remember_tokenizer(model, Letters())
    assert reconstruction.wording_for(model) == WORDING
    key = id(model)
    del model
    assert key not in reconstruction._tokenizers


def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """``veloxquant generate`` knows model and tokenizer: nothing more has to be said."""
    model, tokenizer = tiny.build("llama"), word_tokenizer()
    monkeypatch.setattr(generate, "load", lambda name: (model, tokenizer))
    words = ["generate", "--model", "m", "--prompt", " ".join(f"w{i}" for i in token_list(PROMPT)), "--max-tokens", "4"]
    result = CliRunner().invoke(app, [*words, "--method", "kvzip", "--option", f"kvzip_budget={BUDGET}", "--report"])
    assert result.exit_code == 0, result.output
    assert "kvzip" in result.output and "without being asked" not in result.output
    assert reconstruction.wording_for(model).repeat
