"""The seam before a model's layers: who is called, when, with what, and what follows from it in real runs."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import batch_generate
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from tests.matrix import same_state
from tests.models import tiny
from tests.models.running import decode, greedy, lively, prefill, token_list, word_tokenizer
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, attach
from veloxquant_mlx.attention import forward
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.coordinators.base import Coordinator
from veloxquant_mlx.core.types import Recipe
from veloxquant_mlx.methods import snapkv

NAMES = ("llama", "qwen3", "gemma3")


@dataclasses.dataclass(frozen=True)
class Spy(Coordinator):
    """Notes every call."""

    calls: ClassVar[list[tuple[Any, mx.array, list[CompressedKVCache]]]] = []
    offsets: ClassVar[list[int]] = []
    ended: ClassVar[list[list[CompressedKVCache]]] = []
    attached: ClassVar[list[Any]] = []

    def attach(self, model: Any, slots: Any) -> None:
        self.attached.append(model)

    def before(self, model: Any, inputs: mx.array, caches: list[CompressedKVCache], whole: Any) -> None:
        assert all(ref() is cache for ref, cache in zip(caches[0].peers, caches, strict=True))
        self.offsets.append(caches[0].offset)
        self.calls.append((model, inputs, caches))

    def ends(self, caches: list[CompressedKVCache]) -> None:
        self.ended.append(caches)


@pytest.fixture(autouse=True)
def unwrapped() -> Iterator[None]:
    yield
    forward.uninstall()
    for log in (Spy.calls, Spy.offsets, Spy.ended, Spy.attached):
        log.clear()


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> KVCacheConfig:
    """snapkv with a spy across its layers."""
    original = snapkv.recipe

    def recipe(config: Any, layer: Any) -> Recipe:
        made = original(config, layer)
        assert made.eviction is not None
        return dataclasses.replace(made, eviction=dataclasses.replace(made.eviction, coordinator=Spy()))

    monkeypatch.setattr(snapkv, "recipe", recipe)
    return KVCacheConfig(method="snapkv", snap_budget=60)


def ours(caches: list[Any]) -> list[CompressedKVCache]:
    return [cache for cache in caches if isinstance(cache, CompressedKVCache)]


def ids(count: int = 4) -> mx.array:
    return tiny.tokens(count)


# ------------------------------------------------------------------------------------------------------- who is called


@pytest.mark.parametrize("name", NAMES)
def test_one_call_per_forward(name: str, spied: KVCacheConfig) -> None:
    """Token ids as they come and the caches in the order of the layers; a model inside the model is no second call."""
    model = tiny.build(name)
    caches = KVCacheBuilder.for_model(model, spied)
    assert Spy.attached == [model]
    prompt = tiny.tokens(50)
    greedy(model, prompt[0], 3, prompt_cache=caches, prefill_step_size=20)
    seen = [np.array(inputs)[0].tolist() for _, inputs, _ in Spy.calls]
    assert [len(s) for s in seen[:4]] == [20, 20, 9, 1]
    assert [token for some in seen[:4] for token in some] == np.array(prompt[0]).tolist()
    assert all(m is model and c == ours(caches) for m, _, c in Spy.calls) and {len(s) for s in seen[4:]} == {1}


def test_however_the_arguments_come(spied: KVCacheConfig) -> None:
    model = tiny.build("llama")
    a, b, c = (KVCacheBuilder.for_model(model, spied) for _ in range(3))
    x = mx.random.normal((1, 4, 64))
    outs = [model(ids(), a), model(ids(), cache=b), model(inputs=ids(), cache=c)]
    model(ids(), cache=a, input_embeddings=x)
    assert [caches for _, _, caches in Spy.calls] == [a, b, c, a]
    assert all(mx.array_equal(outs[0], out) for out in outs)
    assert all(mx.array_equal(inputs, ids()) for _, inputs, _ in Spy.calls[:3])
    assert Spy.calls[3][1] is not x and mx.array_equal(Spy.calls[3][1], x)  # what the model computes from


def test_other_calls_go_through(spied: KVCacheConfig) -> None:
    """No cache, the model's own caches, compressed caches that ask for nobody, and models of other classes."""
    model = tiny.build("llama")
    KVCacheBuilder.for_model(model, spied)
    expected = forward._originals[type(model)][0](model, ids())  # type: ignore[misc]
    for cache in (None, make_prompt_cache(model), KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi"))):
        assert mx.allclose(model(ids(), cache=cache), expected, atol=1e-6)
    assert mx.array_equal(model(ids()), expected)
    other = tiny.build("qwen2")
    other(ids(), cache=make_prompt_cache(other))
    assert not Spy.calls


def test_wrapped_once_and_given_back(spied: KVCacheConfig) -> None:
    model = tiny.build("gemma3")
    classes = (type(model), type(model.language_model))
    own = [cls.__call__ for cls in classes]
    signatures = [inspect.signature(call) for call in own]
    for _ in range(2):
        KVCacheBuilder.for_model(model, spied)
    assert [cls.__call__.__wrapped__ for cls in classes] == own  # type: ignore[attr-defined]
    assert [inspect.signature(cls.__call__) for cls in classes] == signatures
    assert forward.uninstall() == 2 and [cls.__call__ for cls in classes] == own
    assert forward.uninstall() == 0


def test_inherited_calls() -> None:
    class Parent(nn.Module):
        def __call__(self, x: int, cache: Any = None) -> int:
            return x + 1

    class Child(Parent):
        pass

    forward.install(Child())
    assert Child()(1) == 2 and "__call__" in vars(Child) and not hasattr(Parent.__call__, "__wrapped__")
    forward.uninstall()
    assert "__call__" not in vars(Child) and Child()(1) == 2


@pytest.mark.parametrize("inner", [False, True])
def test_outer_and_inner_models(inner: bool, spied: KVCacheConfig) -> None:
    """``for_model`` of a wrapper also watches the language model in it, which may be called by itself."""
    model = tiny.build("gemma3")
    caches = KVCacheBuilder.for_model(model.language_model if inner else model, spied)
    model(ids(), cache=caches)
    model.language_model(ids(), cache=caches)
    assert [m for m, _, _ in Spy.calls] == [model.language_model if inner else model, model.language_model]


def test_an_error_does_not_stop_later_calls(spied: KVCacheConfig) -> None:
    model = tiny.build("llama")
    caches = KVCacheBuilder.for_model(model, spied)
    with pytest.raises(TypeError):
        model(ids(), cache=caches, nonsense=1)
    model(ids(), cache=caches)
    assert len(Spy.calls) == 2


def test_end_prefill_tells_the_layers_of_the_latest_forward(spied: KVCacheConfig) -> None:
    model = tiny.build("llama")
    caches = KVCacheBuilder.for_model(model, spied)
    model(ids(), cache=caches)
    twins = copy.deepcopy(caches)
    caches[1].end_prefill()
    twins[0].end_prefill()  # a copy is linked by its own first forward
    assert Spy.ended == [caches]
    model(ids(), cache=twins)
    twins[0].end_prefill()
    assert Spy.ended == [caches, twins]


def test_every_sequence_of_a_batch_by_itself(spied: KVCacheConfig) -> None:
    """Without its padding: put together, the calls of a sequence are its prompt and its answer."""
    model, prompts = tiny.build("llama"), [token_list(70, seed=1), token_list(9, seed=2), token_list(33, seed=3)]
    with attach(model, spied):
        out: Any = batch_generate(
            model,
            word_tokenizer(),
            prompts,
            max_tokens=4,
            prefill_step_size=32,
            return_token_ids=True,
            sampler=lively,
        )
    texts = [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, out.token_ids, strict=True)]
    seen: list[set[int]] = [set() for _ in texts]
    for (_, inputs, caches), start in zip(Spy.calls, Spy.offsets, strict=True):
        assert inputs.shape[0] == 1 and len(caches) == 2
        tokens = np.array(inputs)[0].tolist()
        for text, at in zip(texts, seen, strict=True):
            if text[start : start + len(tokens)] == tokens[: len(text) - start]:
                at.update(range(start, start + len(tokens)))
    assert all(set(range(len(text))) <= at for text, at in zip(texts, seen, strict=True))
    assert sum(inputs.shape[1] for _, inputs, _ in Spy.calls) <= sum(len(text) + 1 for text in texts)


# ------------------------------------------------------------------------------------------------- in real runs

DEPTHS = {"llama": {"num_hidden_layers": 6}, "qwen3": {"num_hidden_layers": 5}, "gemma3_text": {"num_hidden_layers": 8}}
METHODS: dict[str, dict[str, Any]] = {
    "squeeze": {"squeeze_budget": 40},
    "chunkkv": {"chunkkv_budget": 60, "chunkkv_reuse_layers": 2},
    "pyramidkv": {"pyramid_budget": 80},
}


def run(model: Any, method: Any, prompt: list[int], n: int, caches: list[Any] | None = None) -> tuple[list[int], Any]:
    caches = caches or KVCacheBuilder.for_model(model, KVCacheConfig(method=method, **METHODS[method]))
    tokens, _ = greedy(model, mx.array(prompt), n, prompt_cache=caches, prefill_step_size=32, sampler=lively)
    return tokens, caches


def positions(caches: list[Any]) -> list[list[int]]:
    """Positions of the first head, per layer."""
    return [np.sort(np.array(cache.positions)[0, 0]).tolist() for cache in ours(caches)]


@pytest.mark.parametrize("name", DEPTHS)
@pytest.mark.parametrize("method", METHODS)
def test_generate_step(method: str, name: str) -> None:
    """Layers that agree do agree, budgets add up, and nothing depends on the chunks."""
    model, sets = tiny.build(name, **DEPTHS[name]), []
    for step in (32, 7):
        caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=method, **METHODS[method]))  # type: ignore[arg-type]
        prefill(model, caches, tiny.tokens(150), step)
        sets.append(positions(caches))
    assert sets[0] == sets[1]
    sizes, found = [len(s) for s in sets[0]], sets[0]
    if method == "chunkkv":
        assert all(found[i] == found[i - 1] for i in range(1, len(found), 2)) and found[0] != found[2]
    else:
        assert sum(sizes) == len(sizes) * (40 if method == "squeeze" else 80) and len(set(sizes)) > 1


@pytest.mark.parametrize("method", METHODS)
def test_batches_are_as_single_runs(method: Any) -> None:
    """Two prompts of different lengths: budgets and choices of each are its own."""
    model, prompts = tiny.build("llama", **DEPTHS["llama"]), [token_list(150, seed=1), token_list(87, seed=2)]
    singles = [run(model, method, prompt, 12) for prompt in prompts]
    with attach(model, KVCacheConfig(method=method, **METHODS[method])):
        out: Any = batch_generate(
            model,
            word_tokenizer(),
            prompts,
            max_tokens=12,
            prefill_step_size=32,
            return_prompt_caches=True,
            return_token_ids=True,
            sampler=lively,
        )
    assert out.token_ids == [tokens for tokens, _ in singles]
    for caches, (_, own) in zip(out.caches, singles, strict=True):
        for cache in own:
            cache.settle()
        assert [cache.life.budget for cache in caches] == [cache.life.budget for cache in own]
        sizes = [cache.store.live for cache in caches]
        assert sum(sizes) % len(sizes) == 0 or method != "squeeze"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fed", [60, 100])
def test_copies_and_files(method: Any, fed: int, tmp_path: Path) -> None:
    """In the middle of a prompt, and after it with another turn to come."""
    model, ids = tiny.build("qwen3", **DEPTHS["qwen3"]), tiny.tokens(200)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=method, **METHODS[method]))
    if fed == 60:
        model(ids[:, :fed], cache=caches)
    else:
        prefill(model, caches, ids[:, :fed], 32)
    mx.eval([cache.state for cache in caches])
    copies = copy.deepcopy(caches)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, caches)
    loaded: Any = load_prompt_cache(file)
    some: Any
    outs = []
    for some in (caches, copies, loaded):
        prefill(model, some, ids[:, fed:190], 32)
        outs.append(decode(model, some, ids[:, 190:]))
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])
    assert all(same_state(a, b) and same_state(a, c) for a, b, c in zip(caches, copies, loaded, strict=True))
    if method == "chunkkv":
        assert all(positions(loaded)[i] == positions(loaded)[i - 1] for i in range(1, 5, 2))
