"""The real OpenAI client against the server: answers, streams, neighbours, turns, and clients that leave."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from openai import BadRequestError, InternalServerError, NotFoundError, OpenAI

from tests.serve.served import CONFIGS, KIVI, Alone, figures, make_folder, text
from veloxquant_mlx import KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.cache.batch import CompressedBatchCache
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.serve import ServeOptions, Server

LENGTHS = (5, 190, 40, 1, 64, 133, 300, 17)


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def complete(openai: OpenAI, prompt: str, max_tokens: int, **more: Any) -> str:
    return (
        openai.completions.create(model="default_model", prompt=prompt, max_tokens=max_tokens, **more).choices[0].text
    )


def streamed(openai: OpenAI, prompt: str, max_tokens: int) -> str:
    parts = openai.completions.create(model="default_model", prompt=prompt, max_tokens=max_tokens, stream=True)
    return "".join(part.choices[0].text for part in parts)


def options(folder: Path, **more: Any) -> ServeOptions:
    return ServeOptions(str(folder), port=0, **more)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(folder, KIVI)


@pytest.mark.covers("server")
@pytest.mark.covers("server")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_eight_at_a_time_answer_as_one_alone(folder: Path, config: KVCacheConfig) -> None:
    """Prompts of 1 to 300 tokens; half of the clients stream. The prompt cache is off: it changes where chunks end."""
    alone = Alone(folder, config)
    prompts = [(text(n, seed), 8 + seed) for seed, n in enumerate(LENGTHS)]
    with Server(options(folder, prompt_cache_size=0), config) as server, ThreadPoolExecutor(8) as pool:
        openai = client(server)
        ask = [streamed if i % 2 else complete for i in range(8)]
        answers = [pool.submit(ask[i], openai, *prompts[i]) for i in range(8)]
        for (prompt, count), answer in zip(prompts, answers, strict=True):
            assert answer.result() == alone.complete(prompt, count)
        assert server.engine.model_provider.is_batchable


# sliding window, soft-cap (one sequence at a time), attention sinks, recurrent layers between, partial rotation
@pytest.mark.parametrize("name", ["gemma3_text", "gemma2", "gpt_oss", "qwen3_next", "phi3"])
def test_other_kinds_of_models(tmp_path: Path, name: str) -> None:
    place = make_folder(tmp_path / name, name)
    alone, prompts = Alone(place, KIVI), [text(n, seed=n) for n in (70, 3, 41)]
    with Server(options(place, prompt_cache_size=0), KIVI) as server, ThreadPoolExecutor(3) as pool:
        openai = client(server)
        for prompt, answer in zip(prompts, pool.map(lambda p: complete(openai, p, 6), prompts), strict=True):
            assert answer == alone.complete(prompt, 6)
        assert server.engine.model_provider.is_batchable == (name != "gemma2")
        with openai.completions.create(model="default_model", prompt="w1 w2", max_tokens=10**4, stream=True) as parts:
            next(iter(parts))
            found = figures(server)
            assert found["live_cache_bytes"] > 0
            assert (found["live_native_cache_bytes"] > 0) == (name in ("gemma3_text", "gpt_oss", "qwen3_next"))


def test_chat_streams_what_it_answers(server: Server, alone: Alone) -> None:
    openai = client(server)
    messages: Any = [{"role": "system", "content": "w9 w8"}, {"role": "user", "content": text(10, 7)}]
    whole: Any = openai.chat.completions.create(model="default_model", messages=messages, max_tokens=9)
    usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
    parts: list[Any] = list(
        openai.chat.completions.create(model="default_model", messages=messages, max_tokens=9, **usage)
    )
    said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert whole.choices[0].message.content == said == alone.chat(messages, 9)
    assert whole.choices[0].finish_reason == "length"
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 9


def test_stop_words_temperature_and_seed(server: Server, alone: Alone) -> None:
    openai, prompt = client(server), text(20, 3)
    words = alone.complete(prompt, 8).split()
    assert complete(openai, prompt, 8, stop=[words[3]]).split() == words[: words.index(words[3])]
    drawn = [complete(openai, prompt, 8, temperature=1.0, seed=s) for s in (1, 1, 2)]  # a seed is served by itself
    assert drawn[0] == drawn[1] != drawn[2]
    assert complete(openai, prompt, 8, temperature=1e-9) == " ".join(words)


@pytest.mark.covers("server")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_second_turn_computes_only_what_is_new(folder: Path, config: KVCacheConfig) -> None:
    """Methods that drop rows cannot go back: their first turn is reused at the end of a prompt or of an answer."""
    with Server(options(folder), config) as server:
        openai = client(server)
        turns: list[Any] = [{"role": "user", "content": text(40, 5)}]
        first = openai.chat.completions.create(model="default_model", messages=turns, max_tokens=6)
        again = openai.chat.completions.create(model="default_model", messages=turns, max_tokens=6)
        answer = again.choices[0].message.content
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": text(5, 6)}]
        second = openai.chat.completions.create(model="default_model", messages=turns, max_tokens=6)
        prompt, usage = first.usage.prompt_tokens, second.usage  # type: ignore[union-attr]
        assert first.usage.prompt_tokens_details.cached_tokens == 0  # type: ignore[union-attr]
        assert again.usage.prompt_tokens_details.cached_tokens == prompt - 1  # type: ignore[union-attr]
        assert usage.prompt_tokens_details.cached_tokens >= prompt + 5  # type: ignore[union-attr]
        stored = figures(server)["prompt_cache_bytes"]
        assert 0 < stored == server.engine.prompt_cache.nbytes
        for entry in stored_caches(server):
            assert all(type(cache) is CompressedKVCache for cache in entry)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_common_system_prompt_is_computed_once(folder: Path, config: KVCacheConfig) -> None:
    """Also by methods that cannot go back: mlx_lm stores what it has at the end of the system prompt."""
    with Server(options(folder), config) as server:
        for seed, least in ((1, 0), (2, 140)):
            messages: Any = [{"role": "system", "content": text(140, 1)}, {"role": "user", "content": text(9, seed)}]
            answer: Any = client(server).chat.completions.create(model="default_model", messages=messages, max_tokens=4)
            assert answer.usage.prompt_tokens_details.cached_tokens >= least


def stored_caches(server: Server) -> Iterator[list[Any]]:
    """The caches of every stored conversation."""
    nodes = list(server.engine.prompt_cache._trie._trie.values())
    while nodes:
        node = nodes.pop()
        if "__value__" in node:
            yield node["__value__"].prompt_cache
        nodes += [child for key, child in node.items() if key != "__value__"]


# Windows and budgets that keep every row as it is.
WIDE = [
    KVCacheConfig(method="kivi", residual_length=512),
    KVCacheConfig(method="snapkv", snap_budget=512),
    KVCacheConfig(method="streaming_llm", stream_window_size=512),
]


@pytest.mark.parametrize("config", WIDE, ids=lambda config: config.method)
def test_while_nothing_is_compressed_answers_do_not_depend_on_what_was_reused(
    folder: Path, config: KVCacheConfig
) -> None:
    alone, prompt = Alone(folder, config), text(30, 1)
    with Server(options(folder), config) as server:
        openai = client(server)
        for turn in range(4):
            answer = complete(openai, prompt, 6)
            assert answer == alone.complete(prompt, 6)
            prompt = f"{prompt} {answer} {text(turn, 9)}".strip()  # at first exactly the text that is stored
        assert figures(server)['tokens_total{kind="prompt_cached"}'] > 90


def test_a_stored_conversation_and_nothing_more_is_a_prompt_too(server: Server) -> None:
    """mlx_lm finds all tokens stored and has none left to start from; without care that ends the thread."""
    openai, prompt = client(server), text(24, 11)
    longer = f"{prompt} {complete(openai, prompt, 4)}"
    assert complete(openai, longer, 4) == complete(openai, longer, 4)


def test_the_prompt_cache_keeps_to_its_bytes(folder: Path) -> None:
    config = CONFIGS["streaming_llm"]
    with Server(options(folder), config) as server:
        complete(client(server), text(60, 1), 2)
        one, entries = server.engine.prompt_cache.nbytes, len(server.engine.prompt_cache)
    most = int(2.5 * one)
    with Server(options(folder, prompt_cache_bytes=most), config) as server:
        for seed in range(5):
            complete(client(server), text(60, seed), 2)
        found = figures(server)
        assert (found["prompt_cache_bytes"], found["prompt_cache_entries"]) == (2 * one, 2 * entries)


def test_live_caches_are_compressed_batches_and_measured(folder: Path) -> None:
    config = KVCacheConfig(method="kivi", bit_width_inlier=2, kivi_group_size=32, residual_length=32)
    with Server(options(folder), config) as server, ThreadPoolExecutor(2) as pool:
        openai = client(server)
        streams = [
            openai.completions.create(model="default_model", prompt=text(800, s), max_tokens=5000, stream=True)
            for s in (1, 2)
        ]
        for stream in streams:
            next(iter(stream))
        reading = [pool.submit(lambda s=stream: sum(1 for _ in s)) for stream in streams]
        found = figures(server)
        kinds = {type(cache) for cache in server.engine.live._caches}
        for stream in streams:
            stream.close()
        del reading
        assert kinds == {CompressedBatchCache}
        # qwen3 of the tests: 2 layers, 2 heads, head size 32, keys and values: 512 B per token in 16 bits.
        assert found["live_cache_16bit_bytes"] >= 2 * 800 * 512
        assert 1.5 < found["live_cache_times_smaller"] < 8.0
        assert found["live_cache_age_seconds"] < 2.0
        assert found["requests_running"] == 2
        wait_for(server, "requests_running", 0)
        wait_for(server, "live_cache_bytes", 0)


def wait_for(server: Server, figure: str, value: float, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while figures(server)[figure] != value:
        assert time.monotonic() < until, f"{figure} stays {figures(server)[figure]}"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_end_their_requests(server: Server, alone: Alone, stream: bool) -> None:
    openai, gone = client(server), 'requests_total{outcome="disconnected"}'
    before = figures(server)[gone]
    for seed in range(3):
        if stream:
            with openai.completions.create(
                model="default_model", prompt=text(30, seed), max_tokens=10**6, stream=True
            ) as parts:
                next(iter(parts))
        else:
            with pytest.raises(Exception, match="timed out"):
                complete(openai.with_options(timeout=0.3), text(30, seed), 10**6)
    assert complete(openai, text(30, 4), 6) == alone.complete(text(30, 4), 6)
    wait_for(server, "requests_running", 0)
    assert figures(server)[gone] == before + 3
    wait_for(server, "live_cache_bytes", 0)


def test_a_failing_step_is_answered_and_the_server_lives_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(options(folder), KIVI) as server:
        openai, prompt = client(server), text(30, 1)
        expected = complete(openai, prompt, 4)
        original = CompressedBatchCache.update_and_fetch

        def broken(self: Any, keys: mx.array, values: mx.array) -> Any:
            if self.rows[0].offset >= 35:
                raise RuntimeError("out of luck")
            return original(self, keys, values)

        monkeypatch.setattr(CompressedBatchCache, "update_and_fetch", broken)
        with pytest.raises(InternalServerError, match="out of luck"):
            complete(openai, prompt, 20)
        with pytest.raises(Exception, match="out of luck"):
            streamed(openai, prompt, 20)
        monkeypatch.undo()
        assert complete(openai, prompt, 4) == expected
        assert figures(server)['requests_total{outcome="failed"}'] == 2
        wait_for(server, "live_cache_bytes", 0)


def test_capacity_is_refused_before_anything_is_computed(folder: Path) -> None:
    config = dataclasses.replace(KIVI, capacity=64)
    with Server(options(folder), config) as server:
        openai = client(server)
        with pytest.raises(BadRequestError, match="capacity=64"):
            complete(openai, text(50, 1), 15)
        assert len(complete(openai, text(50, 1), 14).split()) == 14


def test_models(server: Server, folder: Path) -> None:
    openai = client(server)
    assert [model.id for model in openai.models.list()] == [str(folder.resolve())]
    assert openai.models.retrieve(str(folder)).id == str(folder.resolve())
    with pytest.raises(NotFoundError, match="not served"):
        openai.models.retrieve("another")
    with pytest.raises(NotFoundError, match="not served"):
        openai.completions.create(model="another", prompt="w1")


def test_a_draft_model_changes_nothing_but_speed(folder: Path, alone: Alone, tmp_path: Path) -> None:
    draft = make_folder(tmp_path / "draft", seed=1)
    with Server(options(folder, draft_model=str(draft)), KIVI) as server:
        assert complete(client(server), text(50, 1), 12) == alone.complete(text(50, 1), 12)
        assert not server.engine.model_provider.is_batchable
    with pytest.raises(QuantizerConfigError, match="draft model"):
        Server(options(folder, draft_model=str(draft)), CONFIGS["snapkv"])
