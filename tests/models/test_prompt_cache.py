"""Caches outlive a call: files, copies, mlx_lm's prompt cache, flat memory, release."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import LRUPromptCache, load_prompt_cache, make_prompt_cache, save_prompt_cache

from tests.matrix import IDS, ROWS, Row, same_state
from tests.models import tiny
from tests.models.running import FIRST, MECHANISMS, caches_of, decode, fine, greedy, prefill, token_list, tolerance
from veloxquant_mlx import QuantizerConfigError

PROMPT = 150
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.build("llama")


def filled(model: Any, row: Row, **fields: Any) -> list[Any]:
    """Caches after a prompt and three steps."""
    caches = caches_of(model, row, **fields)
    prefill(model, caches, tiny.tokens(PROMPT), 64)
    decode(model, caches, tiny.tokens(3, seed=1))
    return caches


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_file_round_trip(row: Row, name: str, tmp_path: Path) -> None:
    """Saved and loaded by mlx_lm, then continued: bit-identical to the caches that went on living."""
    model, file = tiny.build(name), str(tmp_path / "prompt.safetensors")
    caches, more = filled(model, row), tiny.tokens(40, seed=2)
    save_prompt_cache(file, caches, {"made by": row.id})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"made by": row.id} and [type(c) for c in loaded] == [type(c) for c in caches]
    np.testing.assert_array_equal(decode(model, loaded, more), decode(model, caches, more))
    assert [c.nbytes for c in loaded] == [c.nbytes for c in caches]


CONTINUE = """
import sys
import numpy as np
import veloxquant_mlx
from mlx_lm.models.cache import load_prompt_cache
from tests.models import tiny
from tests.models.running import decode

np.save(sys.argv[2], decode(tiny.build("llama"), load_prompt_cache(sys.argv[1]), tiny.tokens(9, seed=2)))
"""


@pytest.mark.parametrize("row", MECHANISMS.values(), ids=MECHANISMS)
def test_another_process_continues(row: Row, llama: Any, tmp_path: Path) -> None:
    """A process that imports veloxquant_mlx and calls nothing of it reads the file and goes on, bit-identically."""
    caches, file, found = filled(llama, row), str(tmp_path / "prompt.safetensors"), str(tmp_path / "logits.npy")
    save_prompt_cache(file, caches)
    script = tmp_path / "go_on.py"
    script.write_text(CONTINUE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, script, file, found], check=True, cwd=ROOT, env=environment, timeout=120)
    np.testing.assert_array_equal(np.load(found), decode(llama, caches, tiny.tokens(9, seed=2)))


# ---------------------------------------------------------------------------------------------- mlx_lm's prompt cache


@pytest.mark.parametrize("row", MECHANISMS.values(), ids=MECHANISMS)
def test_prompt_store(row: Row, llama: Any) -> None:
    """Fetched entries are copies: what one request does to its copy changes neither the store nor another request."""
    store, tokens = LRUPromptCache(), token_list(PROMPT)
    caches = caches_of(llama, row)
    prefill(llama, caches, mx.array([tokens]), 64)
    store.insert_cache("model", tokens, caches)
    assert store.nbytes == sum(c.nbytes for c in caches)
    more = tiny.tokens(70, seed=1)
    runs = []
    for _ in range(2):
        copy, rest = store.fetch_nearest_cache("model", [*tokens, 1, 2])
        assert copy and rest == [1, 2] and {c.offset for c in copy} == {PROMPT}
        runs.append(decode(llama, copy, more))
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(decode(llama, caches, more), runs[0])


@pytest.mark.parametrize("row", FIRST.values(), ids=FIRST)
def test_prompt_store_with_a_shorter_prompt(row: Row, llama: Any) -> None:
    """A stored longer prompt serves a shorter one where the method can trim, and only there."""
    store, tokens = LRUPromptCache(), token_list(PROMPT)
    caches = caches_of(llama, row)
    prefill(llama, caches, mx.array([tokens]), 64)
    store.insert_cache("model", tokens, caches)
    copy, rest = store.fetch_nearest_cache("model", [*tokens[:100], 5])
    if row.drops:
        assert copy is None
        return
    assert copy and rest == [5] and {c.offset for c in copy} == {100}
    assert np.isfinite(decode(llama, copy, tiny.tokens(50, seed=1))).all()


@pytest.mark.parametrize("row", [r for r in FIRST.values() if not r.drops], ids=lambda r: r.id)
@pytest.mark.parametrize("n", [1, 20, 60])
def test_trim_and_regrow(row: Row, n: int, llama: Any) -> None:
    """Trimmed and fed the same tokens again: the same logits."""
    caches = caches_of(llama, row, **fine(row))
    prefill(llama, caches, tiny.tokens(PROMPT), 64)
    more = tiny.tokens(n, seed=1)
    first = decode(llama, caches, more)
    assert [c.trim(n) for c in caches] == [n, n] and {c.offset for c in caches} == {PROMPT}
    again = decode(llama, caches, more)
    np.testing.assert_allclose(again, first, atol=tolerance(row))


# ---------------------------------------------------------------------------------------------------------- memory

STEPS = 200


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_decoding_holds_no_more_than_it_says(row: Row, llama: Any) -> None:
    """Over 200 steps, evaluated as mlx_lm does, memory grows by nbytes and nothing waits to be computed.

    A chain of unevaluated small arrays would pin at least one 4-byte buffer per step, layer and array, and the
    inputs of the step with it: 200 steps x 2 layers x 2 tensors x 2 heads x 16 numbers x 4 bytes = 102 KB of rows
    where bounded methods grow by nothing. The allocator hands out used buffers that are larger than what was asked
    for: 20 KB up and down over 600 steps, without a trend.
    """
    caches = caches_of(llama, row)
    prefill(llama, caches, tiny.tokens(PROMPT), 64)
    run(llama, caches, 64)
    held, active = sum(c.nbytes for c in caches), settled()
    run(llama, caches, STEPS)
    unsettled = settled()
    growth = sum(c.nbytes for c in caches) - held
    assert unsettled - active <= growth + 32768
    if row.method == "streaming_llm":
        assert growth == 0
    mx.eval([c.state for c in caches])
    last_step = sum(c.held_bytes()["window"] for c in caches)  # what left or entered the windows after its logits
    assert abs(settled() - unsettled) <= last_step + 16384


def run(model: Any, caches: list[Any], n: int) -> None:
    """``n`` steps; only the logits are evaluated."""
    token = mx.zeros((1, 1), dtype=mx.int32)
    for _ in range(n):
        token = model(token, cache=caches).argmax(-1)
        mx.eval(token)


def settled() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.parametrize("row", MECHANISMS.values(), ids=MECHANISMS)
@pytest.mark.parametrize("name", ["llama", "gemma3n", "gpt_oss"])
def test_dropped_caches_are_free_at_once(row: Row, name: str) -> None:
    """No cycle keeps a cache alive: it dies with its last reference, without the collector."""
    model = tiny.build(name)
    try:
        caches = caches_of(model, row)
    except QuantizerConfigError as error:  # gemma3n has several hidden states
        assert "needs the residual stream" in str(error) and name == "gemma3n"
        return
    greedy(model, tiny.tokens(40)[0], 4, prompt_cache=caches)
    alive = [weakref.ref(c) for c in caches]
    gc.collect()
    gc.disable()
    try:
        caches.clear()
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("row", MECHANISMS.values(), ids=MECHANISMS)
def test_the_model_is_not_kept_alive(row: Row) -> None:
    """Caches of a method that needs no module of the model do not hold the model."""
    model = tiny.build("llama")
    caches = filled(model, row)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert all(c.nbytes for c in caches)


@pytest.mark.parametrize("row", MECHANISMS.values(), ids=MECHANISMS)
def test_equal_runs_hold_equal_bits(row: Row, llama: Any) -> None:
    """Same seed, same tokens: the same arrays."""
    a, b = filled(llama, row), filled(llama, row)
    assert all(same_state(x, y) for x, y in zip(a, b, strict=True))
    assert len(a) == len(make_prompt_cache(llama))
