"""mlx_lm's batches over compressed caches: batch_generate and BatchGenerator give what single runs give."""

from __future__ import annotations

import copy
import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from tests.matrix import IDS, ROWS, Row, same_state
from tests.models import tiny
from tests.models.running import (
    FIRST,
    MECHANISMS,
    caches_of,
    config,
    decode,
    greedy,
    lively,
    prefill,
    token_list,
    word_tokenizer,
)
from tests.models.test_kinds import KINDS, NOT_MLX_LM, Kind
from veloxquant_mlx import CacheStateError, attach
from veloxquant_mlx.cache.batch import CompressedBatchCache
from veloxquant_mlx.cache.layer import CompressedKVCache

LENGTHS = (5, 50, 500)
STEP = 64  # prompt tokens per call, single runs included: a row's chunks are its own in a batch too
PROMPTS = [token_list(n, seed=i) for i, n in enumerate(LENGTHS)]
TOKENIZER = word_tokenizer()
SOME = list(MECHANISMS.values())


def fills(kind: Kind) -> pytest.MarkDecorator:
    """The cell of the kind in the table's column on batches."""
    return pytest.mark.covers("kinds", kind=kind.title, method="batch", cell=kind.batch)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.build("llama")


def alone(model: Any, row: Row, prompt: list[int], n: int, **kwargs: Any) -> list[int]:
    """Tokens of a run of its own."""
    if "prompt_cache" not in kwargs:
        kwargs["prompt_cache"] = caches_of(model, row)
    return greedy(model, mx.array(prompt), n, prefill_step_size=STEP, sampler=lively, **kwargs)[0]


class Serving:
    """A BatchGenerator that remembers what every request got."""

    def __init__(self, model: Any, **kwargs: Any):
        self.batch = BatchGenerator(model, prefill_step_size=STEP, sampler=lively, **kwargs)
        self.tokens: dict[int, list[int]] = {}
        self.caches: dict[int, list[Any]] = {}

    def insert(self, prompt: list[int], n: int, caches: list[Any] | None = None) -> int:
        uid = self.batch.insert([prompt], [n], caches=None if caches is None else [caches])[0]
        self.tokens[uid] = []
        return uid

    def step(self) -> bool:
        """One call of the model for every live request; False when nothing is left."""
        prompts, responses = self.batch.next()
        for r in responses:
            self.tokens[r.uid].append(r.token)
            if r.prompt_cache is not None:
                self.caches[r.uid] = r.prompt_cache
        return bool(prompts or responses)

    def run(self, steps: int | None = None) -> None:
        while (steps is None or steps > 0) and self.step():
            steps = None if steps is None else steps - 1


# -------------------------------------------------------------------------------------------------- same as single runs


@pytest.mark.covers("batch")
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_batch_generate(row: Row) -> None:
    """Three prompts of very different lengths, answers of different lengths; the returned caches go on alone."""
    model, counts = tiny.build("llama"), [12, 5, 9]
    expected = [alone(model, row, p, n + 3) for p, n in zip(PROMPTS, counts, strict=True)]
    with attach(model, config(row), serve_standalone=True):
        out: Any = batch_generate(
            model,
            TOKENIZER,
            PROMPTS,
            max_tokens=counts,
            return_prompt_caches=True,
            return_token_ids=True,
            prefill_step_size=STEP,
            sampler=lively,
        )
    assert out.token_ids == [tokens[:n] for tokens, n in zip(expected, counts, strict=True)]
    assert out.texts == [" ".join(f"w{t}" for t in tokens) for tokens in out.token_ids]
    for caches, tokens, n in zip(out.caches, expected, counts, strict=True):
        assert {type(c) for c in caches} == {CompressedKVCache}
        assert alone(model, row, tokens[n : n + 1], 2, prompt_cache=caches) == tokens[n + 1 :]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_join_and_leave(row: Row, llama: Any) -> None:
    """Requests come in the middle of others' prompts and answers, leave early, and go on alone or in a new batch."""
    first = Serving(llama)
    ids = [first.insert(PROMPTS[1], 20, caches_of(llama, row))]
    first.run(4)  # decoding
    ids.append(first.insert(PROMPTS[2], 12, caches_of(llama, row)))
    first.run(3)  # in the middle of the long prompt
    ids.append(first.insert(PROMPTS[0], 30, caches_of(llama, row)))
    first.run(9)
    caches, history = first.batch.remove([ids[2]], return_prompt_caches=True)[ids[2]]
    taken, twins, before = copy.deepcopy(caches), copy.deepcopy(caches), list(history)
    first.run()
    expected = [alone(llama, row, PROMPTS[i], n) for i, n in ((1, 20), (2, 12), (0, 30))]
    assert first.tokens[ids[0]] == expected[0] and first.tokens[ids[1]] == expected[1]
    got = first.tokens[ids[2]]
    assert 0 < len(got) < 30 and got == expected[2][: len(got)]
    # What the cache holds: the prompt and the answer but for the token that was about to be fed.
    assert before == PROMPTS[0] + expected[2][: len(before) - len(PROMPTS[0])]
    rest = expected[2][len(before) - len(PROMPTS[0]) :]
    assert {c.offset for c in caches} == {len(before)}
    second = Serving(llama)
    again = second.insert(rest[:1], len(rest) - 1, caches)
    other = second.insert(PROMPTS[1], 6, caches_of(llama, row))
    second.run()
    assert second.tokens[again] == rest[1:] and second.tokens[other] == expected[0][:6]
    assert alone(llama, row, rest[:1], len(rest) - 1, prompt_cache=taken) == rest[1:]
    assert all(same_state(a, b) for a, b in zip(caches, twins, strict=True))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_histories_are_not_touched(row: Row, llama: Any) -> None:
    """Caches given with the prompts, of different lengths, stay as they are: every call gives the same answers."""
    histories = []
    for n in (300, 3, 70):
        caches = caches_of(llama, row)
        prefill(llama, caches, tiny.tokens(n, seed=n), STEP)
        histories.append(caches)
    twins = copy.deepcopy(histories)
    how: dict[str, Any] = {"max_tokens": 6, "return_token_ids": True, "prefill_step_size": STEP, "sampler": lively}
    prompts = [p[:40] for p in PROMPTS]
    runs: Any = [batch_generate(llama, TOKENIZER, prompts, prompt_caches=histories, **how).token_ids for _ in range(2)]
    assert runs[0] == runs[1]
    for caches, twin, prompt, tokens in zip(histories, twins, prompts, runs[0], strict=True):
        assert all(same_state(a, b) and a.offset == b.offset for a, b in zip(caches, twin, strict=True))
        assert alone(llama, row, prompt, 6, prompt_cache=caches) == tokens


# ------------------------------------------------------------------------------------------------ neighbours and memory


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_neighbours_do_not_show(row: Row, llama: Any) -> None:
    """The same row among other neighbours, of other lengths: bit-identical logits, and bit-identical alone after."""

    def run(neighbours: tuple[int, ...]) -> tuple[np.ndarray, list[Any]]:
        caches = [caches_of(llama, row) for _ in range(3)]
        for cache, n in zip(caches, (150, *neighbours), strict=True):
            prefill(llama, cache, tiny.tokens(n, seed=n), STEP)
        batch: list[Any] = [CompressedBatchCache.merge(layer) for layer in zip(*caches, strict=True)]
        logits = []
        for i in range(70):
            ids = mx.concatenate([tiny.tokens(1, seed=i), *(tiny.tokens(1, seed=i * n) for n in neighbours)])
            logits.append(llama(ids, cache=batch)[0])
            mx.eval(logits[-1])
        for c in batch:
            c.filter([0])
        return np.array(mx.concatenate(logits)), batch

    (a, first), (b, second) = run((7, 260)), run((31, 4))
    np.testing.assert_array_equal(a, b)
    assert all(same_state(x.rows[0], y.rows[0]) for x, y in zip(first, second, strict=True))
    assert [c.offset.tolist() for c in first] == [[220]] * len(first)


def settled() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_merge_holds_what_its_parts_held(row: Row, llama: Any) -> None:
    """Real memory, not a sum of claims: parts given up, one step taken so that nothing is shared any more."""
    base = settled()
    parts = [caches_of(llama, row) for _ in range(3)]
    for i, n in enumerate((1000, 300, 1000)):
        prefill(llama, parts[i], tiny.tokens(n, seed=n), STEP)
        decode(llama, parts[i], tiny.tokens(1))  # room to grow is taken now, as in the batch
    held, claimed = settled() - base, sum(c.nbytes for cache in parts for c in cache)
    batch: list[Any] = [CompressedBatchCache.merge(layer) for layer in zip(*parts, strict=True)]
    parts.clear()
    mx.eval(llama(mx.zeros((3, 1), dtype=mx.int32), cache=batch))
    merged = settled() - base
    # The allocator rounds every array up: as many more of them as there are rows and layers may weigh 32 KiB.
    assert merged <= 1.1 * held + 32 * 1024 and sum(c.nbytes for c in batch) <= 1.1 * claimed
    # Each array takes whole pages or a size class of the allocator: up to 4 KiB more, 12 arrays a layer and row.
    assert abs(merged - sum(c.nbytes for c in batch)) <= 4096 * 12 * 6


@pytest.mark.parametrize("row", SOME, ids=MECHANISMS)
def test_memory_is_flat_over_many_requests(row: Row) -> None:
    """Forty requests, at most three at a time, some taken away early: nothing of them stays."""
    model = tiny.build("llama")
    with attach(model, config(row), serve_standalone=True):
        levels = []
        for _ in range(4):
            serving = Serving(model, completion_batch_size=3, prefill_batch_size=2)
            ids = [serving.insert(token_list(3 + 37 * j % 180, seed=j), 4 + j % 5) for j in range(10)]
            serving.run(12)
            serving.batch.remove([ids[4], ids[9]])
            serving.run()
            assert serving.batch.prompt_cache_nbytes == 0
            assert all(len(serving.tokens[uid]) == 4 + j % 5 for j, uid in enumerate(ids) if j not in (4, 9))
            del serving
            levels.append(settled())
    assert max(levels[1:]) - levels[0] <= 4096  # one buffer of the smallest size class


# ------------------------------------------------------------------------------------------------------ kinds of models

# Where mlx_lm's own batches do not give what its single runs give: recurrent state that sees padding, and one query
# offset for all rows.
STOCK_DIFFERS = ("nemotron_h", "afm7", "jamba")
BATCHED = [kind for kind in KINDS if kind.batch == "yes" and not kind.native]
CASES = [
    pytest.param(kind, row, id=f"{kind.model}-{row.method}", marks=fills(kind))
    for kind in BATCHED
    for row in SOME
    if not kind.refusal(row)
]


def batched(model: Any, prompts: list[list[int]], caches: list[list[Any]], n: int = 6) -> list[list[int]]:
    how: dict[str, Any] = {"max_tokens": n, "return_token_ids": True, "prefill_step_size": STEP, "sampler": lively}
    out: Any = batch_generate(model, TOKENIZER, prompts, prompt_caches=caches, **how)
    return out.token_ids


@pytest.mark.parametrize(("kind", "row"), CASES)
def test_kinds_of_models(kind: Kind, row: Row) -> None:
    """Sliding, sinks, fused and soft-capped attention, shared keys, hybrids: batch and single runs agree."""
    model, prompts = tiny.build(kind.model), [PROMPTS[0], PROMPTS[1], PROMPTS[2][:170]]
    expected = [alone(model, row, p, 6) for p in prompts]
    assert batched(model, prompts, [caches_of(model, row) for _ in prompts]) == expected


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[fills(k) for k in KINDS if k.model == n]) for n in STOCK_DIFFERS]
)
def test_kinds_that_mlx_lm_batches_differently(name: str) -> None:
    """What mlx_lm's own batch gives, while nothing is compressed: what it does wrong is not ours."""
    model, prompts = tiny.build(name), [PROMPTS[0], PROMPTS[1], PROMPTS[2][:170]]
    row = FIRST["kivi"]
    ours = batched(model, prompts, [caches_of(model, row, residual_length=1024) for _ in prompts])
    assert ours == batched(model, prompts, [make_prompt_cache(model) for _ in prompts])


@fills(next(kind for kind in KINDS if kind.model == "gemma2"))
@pytest.mark.parametrize("row", [r for r in SOME if not r.queries], ids=lambda r: r.id)
def test_no_mask_per_sequence(row: Row) -> None:
    """Gemma 2 lines a mask per sequence up with its heads: mlx_lm's own batch fails, or is wrong in silence."""
    model = tiny.build("gemma2")
    with pytest.raises(ValueError, match="CompressedKVCache.*does not yet support batching"):
        batched(model, PROMPTS[:2], [caches_of(model, row) for _ in range(2)])
    caches = [caches_of(model, row)[0] for _ in range(2)]
    assert not hasattr(caches[0], "merge")  # the server asks this and runs such requests one by one
    with pytest.raises(CacheStateError, match="cannot take a mask per sequence"):
        CompressedBatchCache.merge(caches)


@pytest.mark.parametrize("kind", [pytest.param(k, id=k.model, marks=fills(k)) for k in KINDS if NOT_MLX_LM in k.batch])
def test_kinds_that_mlx_lm_cannot_batch(kind: Kind) -> None:
    """Chunked attention and dynamic positions: an error, with our caches as with its own."""
    model = tiny.build(kind.model)
    for caches in (lambda: make_prompt_cache(model), lambda: caches_of(model, FIRST["kivi"])):
        with pytest.raises(ValueError, match=r"does not yet support batching|\[convert\]"):
            batched(model, PROMPTS[:2], [caches() for _ in range(2)])


@pytest.mark.parametrize("kind", [pytest.param(k, id=k.model, marks=fills(k)) for k in KINDS if k.native])
def test_nothing_compressed(kind: Kind) -> None:
    """The caches are mlx_lm's own, and so is the batch."""
    model, row = tiny.build(kind.model), FIRST["kivi"]
    with pytest.warns(UserWarning, match="no layer of this model can be compressed"):
        caches = [caches_of(model, row) for _ in range(2)]
    assert batched(model, PROMPTS[:2], caches) == [
        alone(model, row, p, 6, prompt_cache=make_prompt_cache(model)) for p in PROMPTS[:2]
    ]
