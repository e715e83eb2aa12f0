"""Cache slots of many architectures: what is compressed, what is left and why, and the facts about each layer."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from tests.models import tiny
from veloxquant_mlx.core.exceptions import QuantizerConfigError
from veloxquant_mlx.models.inspect import cache_slots
from veloxquant_mlx.models.rope import Rotation, UnknownRotation

WINDOW, RECURRENT, LATENT = "sliding window", "recurrent state", "latent attention"
CHUNKED, SEVERAL = "chunked attention", "several caches"

# Per slot: the start of the reason, or (head_dim, value_dim, kv_heads, query_heads, channels that turn or None for
# unknown) of a slot that gets compressed.
PLAIN = (16, 16, 2, 4, 16)
NOPE = (16, 16, 2, 4, 0)
SLOTS: dict[str, list[Any]] = {
    "llama": [PLAIN] * 2,
    "llama_yarn": [PLAIN] * 2,
    "llama_dynamic": [(16, 16, 2, 4, None)] * 2,
    "mistral": [(32, 32, 2, 4, 32)] * 2,
    "qwen2": [PLAIN] * 2,
    "qwen3": [(32, 32, 2, 4, 32)] * 2,
    "smollm3": [PLAIN] * 3 + [NOPE],
    "gemma2": [PLAIN] * 2,
    "gemma3_text": [WINDOW, (32, 32, 2, 4, 32)] * 2,
    "gemma3n": [WINDOW, PLAIN] * 2,
    "gemma4_text": [WINDOW, (32, 32, 1, 4, 8)] * 2,
    "gpt_oss": [WINDOW, PLAIN],
    "phi3": [(16, 16, 2, 4, 8)] * 2,
    "cohere2": [WINDOW, NOPE] * 2,  # has a rope module in every layer and does not use it in these
    "minicpm3": [(24, 16, 4, 4, 16)] * 2,
    "deepseek_v3": [LATENT] * 2,
    "qwen3_next": [RECURRENT, (32, 32, 2, 4, 16)] * 2,
    "jamba": [RECURRENT, NOPE],
    "nemotron_h": [RECURRENT, NOPE],  # four layers, two slots
    "falcon_h1": [SEVERAL] * 2,
    "llama4": [CHUNKED] * 3 + [NOPE],
    "afm7": [(16, 16, 2, 4, None)] * 2,  # normalises keys after turning them
    "iquestloopcoder": [(16, 16, 2, 4, None)] * 2 + [WINDOW] * 2,
    "nanbeige": [PLAIN] * 4,  # two layers, run twice
    "gpt2": [(16, 16, 4, 4, 0)] * 2,
    "exaone": [PLAIN] * 2,  # layer.attn wraps the attention module
    "exaone4": [WINDOW, NOPE] * 2,
    "dbrx": [PLAIN] * 2,
    "phixtral": [(16, 16, 4, 4, 8)] * 2,
    "mistral3": [PLAIN] * 2,
    "ministral3": [PLAIN] * 2,
    "mamba2": [RECURRENT] * 2,
}


@pytest.mark.parametrize("name", SLOTS)
def test_slots(name: str) -> None:
    model = tiny.build(name)
    slots = cache_slots(model)
    expected = SLOTS[name]
    assert [type(s.native) for s in slots] == [type(c) for c in make_prompt_cache(model)]
    assert [s.index for s in slots] == list(range(len(expected)))
    for slot, want in zip(slots, expected, strict=True):
        if isinstance(want, str):
            assert slot.layer is None and slot.reason.startswith(want)
            continue
        layer = slot.layer
        assert layer is not None and slot.reason == "" and layer.index == slot.index
        assert (layer.head_dim, layer.value_dim, layer.kv_heads, layer.query_heads) == want[:4]
        if want[4] is None:
            assert isinstance(layer.rope, UnknownRotation)
        elif want[4] == 0:
            assert layer.rope is None
        else:
            assert isinstance(layer.rope, Rotation) and np.count_nonzero(layer.rope.rate) == want[4]
    layers = [s.layer for s in slots if s.layer is not None]
    assert [(x.rank, x.n_layers) for x in layers] == [(i, len(layers)) for i in range(len(layers))]


@pytest.mark.parametrize(
    "name, shared", [("llama", False), ("nemotron_h", False), ("gemma3n", True), ("gemma4_text", True), ("afm7", True)]
)
def test_layers_that_share_their_rows_say_so(name: str, shared: bool) -> None:
    assert {s.layer.shared for s in cache_slots(tiny.build(name)) if s.layer is not None} == {shared}


@pytest.mark.parametrize(
    "name, hooked",
    [("llama", True), ("gpt_oss", True), ("gemma2", False), ("stablelm", False), ("iquestloopcoder", None)],
)
def test_hooked_tells_whether_queries_reach_the_cache(name: str, hooked: bool | None) -> None:
    assert {s.hooked for s in cache_slots(tiny.build(name)) if s.layer is not None} == {hooked}


def test_every_call_gives_fresh_caches_and_the_same_facts() -> None:
    model = tiny.build("gemma3_text")
    first, second = cache_slots(model), cache_slots(model)
    assert not {id(s.native) for s in first} & {id(s.native) for s in second}
    assert [s.layer for s in first] == [s.layer for s in second]


def test_probing_leaves_the_model_as_it_was_and_does_not_keep_it() -> None:
    model = tiny.build("llama")
    before = copy.deepcopy(dict(model.parameters()))
    slots = cache_slots(model)
    assert str(before) == str(model.parameters())
    layers, alive = [s.layer for s in slots], weakref.ref(model.layers[0].self_attn)
    del model, slots
    gc.collect()
    assert layers[0] is not None and alive() is None


# -- models that are not of mlx_lm -------------------------------------------------------------------------------------


class Fake:
    """A model by duck typing: ``layers`` as given; ``args`` only where given."""

    def __init__(self, *attentions: Any, name: str = "self_attn", args: Any = None) -> None:
        self.layers = [SimpleNamespace() if a is None else SimpleNamespace(**{name: a}) for a in attentions]
        if args is not None:
            self.args = args


HEADS = SimpleNamespace(hidden_size=96, num_attention_heads=4, num_key_value_heads=1)


@pytest.mark.parametrize(
    "model, head_dim",
    [
        (Fake(SimpleNamespace(head_dim=80)), 80),
        (Fake(SimpleNamespace(head_dim=80), name="attn", args=SimpleNamespace(head_dim=64)), 80),
        (Fake(SimpleNamespace(), args=SimpleNamespace(head_dim=64, hidden_size=96, num_attention_heads=4)), 64),
        (Fake(SimpleNamespace(), args=HEADS), 24),
        (Fake(SimpleNamespace()), 128),
        (SimpleNamespace(model=Fake(SimpleNamespace(head_dim=80))), 80),
    ],
)
def test_head_dim_of_duck_typed_models(model: Any, head_dim: int) -> None:
    (slot,) = cache_slots(model)
    assert slot.layer is not None and slot.layer.head_dim == head_dim and isinstance(slot.native, KVCache)


def test_wrapper_takes_layers_sizes_and_caches_from_its_language_model() -> None:
    class Language(Fake):
        def make_cache(self) -> list[Any]:
            return [RotatingKVCache(8), KVCache()]

    class Wrapper(SimpleNamespace):
        def make_cache(self) -> list[Any]:
            raise AssertionError("the language model knows better")

    language = Language(SimpleNamespace(), SimpleNamespace(), args=HEADS)
    language.make_cache = lambda: pytest.fail("a hook on the instance must not be called")  # type: ignore[method-assign]
    window, full = cache_slots(Wrapper(language_model=language, args=SimpleNamespace(vocab_size=5)))
    assert window.reason.startswith(WINDOW) and window.attention is not None
    assert full.layer is not None and (full.layer.head_dim, full.layer.kv_heads) == (24, 1)


def test_layer_without_attention_keeps_the_native_cache() -> None:
    class Hybrid(Fake):
        def make_cache(self) -> list[Any]:
            return [ArraysCache(2), KVCache()]

    hybrid, plain = cache_slots(Hybrid(None, SimpleNamespace())), cache_slots(Fake(None, SimpleNamespace()))
    assert [type(s.native) for s in hybrid] == [ArraysCache, KVCache] and hybrid[0].reason == RECURRENT
    assert [type(s.native) for s in plain] == [KVCache, KVCache] and plain[0].reason == "no attention"
    assert hybrid[1].layer is not None and plain[1].layer is not None


def test_unknown_cache_types_stay() -> None:
    class Own:
        pass

    class Model(Fake):
        def make_cache(self) -> list[Any]:
            return [Own()]

    (slot,) = cache_slots(Model(SimpleNamespace()))
    assert slot.layer is None and slot.reason == "Own: not a plain key-value cache"


def test_raising_make_cache_warns_and_gives_plain_caches() -> None:
    class Broken(Fake):
        def make_cache(self) -> list[Any]:
            raise KeyError("window")

    with pytest.warns(UserWarning, match=r"make_cache.* raised KeyError"):
        slots = cache_slots(Broken(SimpleNamespace(), None))
    assert [type(s.native) for s in slots] == [KVCache, KVCache]


@pytest.mark.parametrize("depth", [1, 3])
def test_instance_hooks_do_not_recurse(depth: int) -> None:
    model = tiny.build("gemma3_text")
    for _ in range(depth):
        model.make_cache = lambda: [s.native for s in cache_slots(model)]
    assert [type(c).__name__ for c in make_prompt_cache(model)] == ["RotatingKVCache", "KVCache"] * 2


def test_a_part_that_calls_back_is_refused() -> None:
    class Outer(Fake):
        def make_cache(self) -> list[Any]:
            return [s.native for s in cache_slots(self)]

    outer = Outer(SimpleNamespace())
    with pytest.raises(QuantizerConfigError, match="outermost model"):
        cache_slots(outer)
    assert len(cache_slots(Fake(SimpleNamespace()))) == 1  # the guard is released


@pytest.mark.parametrize("model", [object(), nn.Linear(2, 2), SimpleNamespace(model=object())])
def test_model_without_layers(model: Any) -> None:
    with pytest.raises(QuantizerConfigError, match=r"neither \.layers nor \.model\.layers"):
        cache_slots(model)
