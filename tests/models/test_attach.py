"""attach: code that asks the model for its caches gets compressed ones, until detach."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from mlx_lm import batch_generate, generate
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tests.matrix import Row
from tests.models import tiny
from tests.models.running import FIRST, caches_of, config, greedy, token_list, word_tokenizer
from veloxquant_mlx import CacheStateError, KVCacheConfig, QuantizerConfigError, attach
from veloxquant_mlx.cache.layer import CompressedKVCache

PROMPT = 150
SOME = list(FIRST.values())


def kinds(model: Any) -> list[type]:
    return [type(c) for c in make_prompt_cache(model)]


@pytest.mark.parametrize("row", SOME, ids=FIRST)
def test_every_entry_point_compresses(row: Row) -> None:
    """No prompt_cache argument anywhere: make_prompt_cache, generate and batch_generate take the model's caches."""
    model, prompt = tiny.build("llama"), tiny.tokens(PROMPT)[0]
    expected, _ = greedy(model, prompt, 6, prompt_cache=caches_of(model, row))
    text = " ".join(f"w{t}" for t in expected)
    attachment = attach(model, config(row), serve_standalone=True)
    assert kinds(model) == [CompressedKVCache] * 2
    for _ in range(2):  # every request has caches of its own
        assert greedy(model, prompt, 6)[0] == expected
        assert generate(model, word_tokenizer(), token_list(PROMPT), max_tokens=6) == text
    prompts = [token_list(PROMPT)] * 2
    out: Any = batch_generate(model, word_tokenizer(), prompts, max_tokens=6, return_prompt_caches=True)
    assert out.texts == [text] * 2
    assert {type(c) for caches in out.caches for c in caches} == {CompressedKVCache}
    attachment.detach()
    assert kinds(model) == [KVCache] * 2 and "make_cache" not in vars(model)


def test_hybrids_keep_their_own_layers() -> None:
    for name in ("gemma3_text", "qwen3_next"):
        model = tiny.build(name)
        stock = kinds(model)
        with attach(model, config(FIRST["kivi"])):
            assert kinds(model) == [CompressedKVCache if kind is KVCache else kind for kind in stock]
        assert kinds(model) == stock


def test_a_make_cache_from_before_comes_back() -> None:
    model, mine = tiny.build("llama"), [KVCache(), KVCache()]
    own = model.make_cache = lambda: mine
    with attach(model, KVCacheConfig(method="kivi")) as attachment:
        assert kinds(model) == [CompressedKVCache] * 2
    assert model.make_cache is own and make_prompt_cache(model) is mine
    attachment.detach()  # a second time: nothing
    assert model.make_cache is own


def test_one_made_while_attached_stays() -> None:
    """Detaching takes away what attach set, not what somebody set after it."""
    model = tiny.build("llama")
    attachment = attach(model, KVCacheConfig(method="kivi"))
    later = model.make_cache = lambda: [KVCache(), KVCache()]
    attachment.detach()
    assert model.make_cache is later


def test_an_old_handle_leaves_a_new_attachment_alone() -> None:
    model = tiny.build("llama")
    old = attach(model, KVCacheConfig(method="kivi"))
    old.detach()
    new = attach(model, KVCacheConfig(method="turboquant_rvq", bit_width_inlier=2))
    old.detach()
    assert kinds(model) == [CompressedKVCache] * 2
    new.detach()
    assert kinds(model) == [KVCache] * 2


def test_an_exception_detaches() -> None:
    model = tiny.build("llama")
    with pytest.raises(ZeroDivisionError), attach(model, KVCacheConfig(method="kivi")):
        _ = 1 // 0
    assert kinds(model) == [KVCache] * 2


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"method": "kivi", "bit_width_inlier": 17}, "bit_width_inlier"),
        ("llama", {"method": "no such"}, "no such"),
        ("llama", {"method": "turboquant_mse"}, "standalone"),
        ("gemma2", {"method": "snapkv"}, "needs the model's queries"),
    ],
)
def test_a_bad_configuration_shows_at_once(name: str, fields: dict[str, Any], message: str) -> None:
    model = tiny.build(name)
    with pytest.raises(QuantizerConfigError, match=message):
        attach(model, KVCacheConfig(**fields))
    assert kinds(model) == [KVCache] * 2


def test_a_second_attachment_is_refused() -> None:
    model = tiny.build("llama")
    with attach(model, KVCacheConfig(method="kivi")):
        with pytest.raises(CacheStateError, match="attached already"):
            attach(model, KVCacheConfig(method="snapkv"))
        assert make_prompt_cache(model)[0].config.method == "kivi"


def test_later_changes_of_the_configuration_do_nothing() -> None:
    """It was checked when it was attached; what is changed afterwards was not."""
    model, wanted = tiny.build("llama"), KVCacheConfig(method="kivi", bit_width_inlier=4)
    with attach(model, wanted):
        wanted.bit_width_inlier = 17
        assert [c.config.bit_width_inlier for c in make_prompt_cache(model)] == [4, 4]


@pytest.mark.parametrize("detach", [True, False])
def test_the_model_is_free_at_once(detach: bool) -> None:
    """Neither the handle nor the model's own make_cache keeps it alive; detaching a dead model does nothing."""
    model = tiny.build("llama")
    attachment = attach(model, KVCacheConfig(method="kivi"))
    greedy(model, tiny.tokens(40)[0], 3)
    if detach:
        attachment.detach()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    attachment.detach()


def test_two_models_in_two_threads() -> None:
    """Each thread's model makes its own method's caches and says what it says alone."""
    jobs = [(tiny.build("llama"), FIRST["turboquant_rvq"]), (tiny.build("qwen3", seed=1), FIRST["kivi"])]
    prompt = tiny.tokens(PROMPT)[0]
    expected = [greedy(m, prompt, 8, prompt_cache=caches_of(m, row))[0] for m, row in jobs]
    found: list[list[list[int]]] = [[], []]
    methods: list[set[str]] = [set(), set()]
    ready = threading.Barrier(2)

    def work(i: int) -> None:
        model, row = jobs[i]
        for _ in range(3):
            ready.wait(timeout=60)
            with attach(model, config(row)):
                methods[i] |= {c.config.method for c in make_prompt_cache(model)}
                found[i].append(greedy(model, prompt, 8)[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[tokens] * 3 for tokens in expected]
    assert methods == [{row.method} for _, row in jobs]
