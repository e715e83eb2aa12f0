"""mlx_lm's own generation, unchanged, over the caches of for_model on tiny random models."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import generate, stream_generate
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from tests.matrix import IDS, ROWS, Row
from tests.models import tiny
from tests.models.running import FIRST, caches_of, decode, greedy, prefill, token_list, word_tokenizer
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.cache.layer import CompressedKVCache, Mode
from veloxquant_mlx.cache.report import cache_report

PROMPT = 150  # long enough that every row of the matrix compresses something
KIVI, SNAPKV = FIRST["kivi"], FIRST["snapkv"]
KIVI_8: dict[str, Any] = {"bit_width_inlier": 8, "kivi_group_size": 32, "residual_length": 32}


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.build("llama")


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return word_tokenizer()


def expected_tokens(model: Any, row: Row, prompt: mx.array, n: int, step: int) -> list[int]:
    """Greedy tokens by plain calls of the model."""
    caches = caches_of(model, row)
    out = [int(prefill(model, caches, prompt[None], step)[-1].argmax())]
    for _ in range(n - 1):
        out.append(int(decode(model, caches, mx.array([out[-1:]]))[-1].argmax()))
    return out


@pytest.mark.covers("generate")
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_generate_unchanged(row: Row, llama: Any, tokenizer: TokenizerWrapper) -> None:
    """All three entry points, prompt in five prefill steps: the same tokens as plain calls of the model."""
    prompt, n, step = tiny.tokens(PROMPT)[0], 12, 32
    expected = expected_tokens(llama, row, prompt, n, step)
    tokens, logprobs = greedy(llama, prompt, n, prompt_cache=caches_of(llama, row), prefill_step_size=step)
    assert tokens == expected and np.isfinite(logprobs).all()
    how: dict[str, Any] = {"max_tokens": n, "prefill_step_size": step}
    caches = caches_of(llama, row)
    streamed = list(stream_generate(llama, tokenizer, prompt, prompt_cache=caches, **how))
    assert [r.token for r in streamed][:n] == expected
    text = generate(llama, tokenizer, token_list(PROMPT), prompt_cache=caches_of(llama, row), **how)
    assert text.split() == [f"w{t}" for t in expected]
    assert {c.offset for c in caches} == {PROMPT + n}
    assert {c._mode for c in caches} == {Mode.HANDLE}


@pytest.mark.parametrize("row", FIRST.values(), ids=FIRST)
def test_make_cache(row: Row, tokenizer: TokenizerWrapper) -> None:
    """A model whose make_cache is ours serves every request with caches of its own."""
    model, prompt = tiny.build("llama"), tiny.tokens(PROMPT)[0]
    expected = expected_tokens(model, row, prompt, 6, 2048)
    model.make_cache = lambda: caches_of(model, row)
    for _ in range(2):
        assert greedy(model, prompt, 6)[0] == expected
    assert generate(model, tokenizer, token_list(PROMPT), max_tokens=6).split() == [f"w{t}" for t in expected]
    assert all(isinstance(c, CompressedKVCache) for c in make_prompt_cache(model))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("step", [1, 4, 7])
def test_small_prefill_steps(row: Row, step: int, llama: Any) -> None:
    """37 tokens in small steps against one step. Where chunks see the same rows, only the order of sums differs."""
    prompt = tiny.tokens(37)[0]
    _, small = greedy(llama, prompt, 4, prompt_cache=caches_of(llama, row), prefill_step_size=step)
    _, large = greedy(llama, prompt, 4, prompt_cache=caches_of(llama, row), prefill_step_size=64)
    assert np.isfinite(small).all()
    if row.identity >= 41:
        np.testing.assert_allclose(small, large, atol=2e-5)  # float32, sums of up to 41 terms in two layers


def test_small_prefill_steps_at_high_bits(llama: Any) -> None:
    """At 8 bits it barely matters that later chunks see encoded rows: half a step is 0.2 % of a group's range."""
    prompt, config = tiny.tokens(97)[0], KVCacheConfig(method="kivi", **KIVI_8)
    runs = [
        greedy(llama, prompt, 4, prompt_cache=KVCacheBuilder.for_model(llama, config), prefill_step_size=step)[1]
        for step in (4, 128)
    ]
    np.testing.assert_allclose(runs[0], runs[1], atol=0.02)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_prompt_of_one_token(row: Row, llama: Any) -> None:
    """Nothing is compressed before the first answer: exactly mlx_lm's own numbers."""
    prompt = tiny.tokens(1)[0]
    _, ours = greedy(llama, prompt, 3, prompt_cache=caches_of(llama, row))
    _, stock = greedy(llama, prompt, 3)
    np.testing.assert_array_equal(ours[0], stock[0])
    assert np.isfinite(ours).all()


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_second_turn(row: Row, llama: Any) -> None:
    """One cache over two turns equals plain calls over the same tokens in the same steps."""
    turns, n = (tiny.tokens(PROMPT)[0], tiny.tokens(40, seed=1)[0]), 5
    caches, plain = caches_of(llama, row), caches_of(llama, row)
    for turn in turns:
        tokens, logprobs = greedy(llama, turn, n, prompt_cache=caches, prefill_step_size=64)
        first = prefill(llama, plain, turn[None], 64)[-1]
        rest = decode(llama, plain, mx.array([tokens]))
        expected = np.concatenate([first[None], rest[:-1]])
        expected = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert {c.offset for c in caches} == {c.offset for c in plain} == {PROMPT + 40 + 2 * n}


@pytest.mark.parametrize("row", FIRST.values(), ids=FIRST)
def test_kv_bits_leaves_our_caches_alone(row: Row, llama: Any) -> None:
    caches = caches_of(llama, row)
    before, prompt = list(caches), tiny.tokens(PROMPT)[0]
    tokens, _ = greedy(llama, prompt, 5, prompt_cache=caches, kv_bits=4, quantized_kv_start=0)
    assert all(a is b for a, b in zip(caches, before, strict=True))
    assert tokens == expected_tokens(llama, row, prompt, 5, 2048)


# ---------------------------------------------------------------------------------------------------- architectures

# Latent attention, caches of its own or no keys at all: nothing to compress.
NATIVE = ("deepseek_v3", "falcon_h1", "mamba2")
BY_HAND = ("gemma2", "stablelm")  # attention that does not come back to the cache
SERVED = [name for name in tiny.CONFIGS if name not in NATIVE]
UNCHANGED: dict[Any, dict[str, Any]] = {
    "kivi": {"residual_length": 128},
    "snapkv": {"snap_budget": 4096},
    "streaming_llm": {},
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("method", UNCHANGED)
def test_identity_while_nothing_is_compressed(name: str, method: Any) -> None:
    """Prompt in chunks and decoding below residual, budget and window: bit-identical to mlx_lm's own cache."""
    model, ids = tiny.build(name), tiny.tokens(34, seed=3)
    config = KVCacheConfig(method=method, **UNCHANGED[method])
    if name in BY_HAND and method == "snapkv":
        with pytest.raises(QuantizerConfigError, match="needs the model's queries"):
            KVCacheBuilder.for_model(model, config)
        return
    try:
        caches = KVCacheBuilder.for_model(model, config)
    except QuantizerConfigError as error:  # a rotation that is no plain rotary module
        assert method == "streaming_llm" and "moves no keys" in str(error)
        return
    stock = make_prompt_cache(model)
    for run, part in ((prefill, ids[:, :25]), (decode, ids[:, 25:])):
        arguments = (9,) if run is prefill else ()
        np.testing.assert_array_equal(run(model, caches, part, *arguments), run(model, stock, part, *arguments))
    ours = [c for c in caches if isinstance(c, CompressedKVCache)]
    assert ours and {c._mode for c in ours} == {Mode.ARRAY if name in BY_HAND else Mode.HANDLE}


@pytest.mark.parametrize("name", SERVED)
def test_eight_bits_are_close(name: str) -> None:
    """kivi at 8 bits, 64 of 96 rows packed, on every architecture: sinks, shared keys, soft caps, loops, MQA.

    Half a step of 8 bits is 0.2 % of a group's range. Mean error measured: 0.1 to 1.7 % of the logits' spread, and
    three to four times as much at 6 bits; layers that read a wrong row are off by the spread itself.
    """
    model, ids = tiny.build(name), tiny.tokens(104, seed=4)
    caches, stock = KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi", **KIVI_8)), make_prompt_cache(model)
    spread = prefill(model, stock, ids[:, :96], 32).std()
    prefill(model, caches, ids[:, :96], 32)
    ours, theirs = decode(model, caches, ids[:, 96:]), decode(model, stock, ids[:, 96:])
    assert np.abs(ours - theirs).mean() < 0.03 * spread
    packed = [c for c in caches if isinstance(c, CompressedKVCache)]
    assert all(c.held_bytes()["packed"] for c in packed)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma3_text", "sliding window"),
        ("gpt_oss", "sliding window"),
        ("cohere2", "sliding window"),
        ("qwen3_next", "recurrent state"),
        ("jamba", "recurrent state"),
        ("nemotron_h", "recurrent state"),
    ],
)
def test_hybrids_keep_their_native_caches(name: str, reason: str) -> None:
    model = tiny.build(name)
    caches, stock = caches_of(model, FIRST["turboquant_rvq"]), make_prompt_cache(model)
    assert len(caches) == len(stock)
    for ours, theirs in zip(caches, stock, strict=True):
        assert type(ours) is (CompressedKVCache if type(theirs) is KVCache else type(theirs))
    _, logprobs = greedy(model, tiny.tokens(40)[0], 4, prompt_cache=caches, prefill_step_size=16)
    assert np.isfinite(logprobs).all()
    report = cache_report(caches)
    assert {layer.method for layer in report.layers} == {"turboquant_rvq", "-"}
    assert all(any(reason in why for why in layer.attention) for layer in report.layers if layer.method == "-")
    assert reason in str(report)


@pytest.mark.parametrize("name", NATIVE)
def test_nothing_to_compress_is_said(name: str) -> None:
    model = tiny.build(name)
    with pytest.warns(UserWarning, match="no layer of this model can be compressed"):
        caches = caches_of(model, KIVI)
    assert [type(c) for c in caches] == [type(c) for c in make_prompt_cache(model)]


@pytest.mark.parametrize("row", [r for r in FIRST.values() if not r.queries], ids=lambda r: r.id)
@pytest.mark.parametrize("name", BY_HAND)
def test_array_mode(name: str, row: Row) -> None:
    """Models that attend by themselves get decoded rows: the same tokens in both, and finite."""
    model = tiny.build(name)
    caches = caches_of(model, row)
    _, logprobs = greedy(model, tiny.tokens(PROMPT)[0], 5, prompt_cache=caches, prefill_step_size=32)
    assert np.isfinite(logprobs).all()
    assert {c._mode for c in caches} == {Mode.ARRAY}
    assert "decoded arrays" in str(cache_report(caches))


# ------------------------------------------------------------------------------------------------- threads, no waiting


def test_two_models_in_two_threads() -> None:
    """Both compress at once; each gets the tokens that it gets alone."""
    jobs = [(tiny.build("llama"), FIRST["turboquant_rvq"]), (tiny.build("qwen3", seed=1), KIVI)]
    prompt = tiny.tokens(PROMPT)[0]
    expected = [greedy(m, prompt, 6, prompt_cache=caches_of(m, row))[0] for m, row in jobs]
    found: dict[int, list[list[int]]] = {0: [], 1: []}

    def work(i: int) -> None:
        model, row = jobs[i]
        for _ in range(2):
            found[i].append(greedy(model, prompt, 6, prompt_cache=caches_of(model, row))[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [expected[i]] * 2 for i in found}


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_decoding_never_waits(row: Row, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """70 decode steps become one graph: seals and evictions included, nothing reads a number on the way.

    Inside mx.compile every array of the steps is a placeholder: eval, item, tolist and numpy raise on it. minicache and
    xkv may wait once per 64 or 32 tokens, for the number of rows that stay exact: here until the next block is full.
    """
    caches, count = caches_of(llama, row), {"minicache": 40, "xkv": 9}.get(row.method, 70)
    prefill(llama, caches, tiny.tokens(PROMPT), 64)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the host waits for the device")

    def steps(ids: mx.array) -> list[mx.array]:
        for name in ("eval", "async_eval", "synchronize"):
            monkeypatch.setattr(mx, name, refuse)
        out = [llama(ids[:, i : i + 1], cache=caches) for i in range(ids.shape[1])]
        monkeypatch.undo()
        return out

    out = mx.compile(steps)(tiny.tokens(count, seed=1))
    assert {c.offset for c in caches} == {PROMPT + count} and len(out) == count
