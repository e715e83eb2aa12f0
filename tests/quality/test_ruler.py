"""The suite of long texts: what it asks is in the texts, and what it says of a model is right."""

from __future__ import annotations

import json
import re
from collections import Counter
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from tests.models import tiny
from tests.models.running import word_tokenizer
from tests.quality.letters import letters
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.core.exceptions import CacheInputError, QuantizerConfigError
from veloxquant_mlx.quality import ruler_tasks as tasks
from veloxquant_mlx.quality.ruler import UNCOMPRESSED, longest, prompt_of, ruler

SAMPLES = 4


def words(sample: tasks.Sample) -> int:
    return len(f"{sample.text} {sample.question} {sample.lead} {sample.right}".split())


def made(task: str, index: int = 1, length: int = 400, seed: int = 0) -> tasks.Sample:
    return tasks.make(task, index, SAMPLES, length, seed, words)


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(SAMPLES))
@pytest.mark.parametrize("task", [task for task in tasks.TASKS if task != "common"])
def test_every_answer_stands_in_the_text_at_the_stated_depths(task: str, index: int) -> None:
    sample = made(task, index)
    assert len(sample.marks) == len(sample.answers) > 0
    for mark, depth, answer in zip(sample.marks, sample.depths, sample.answers, strict=True):
        piece = sample.pieces[mark]
        assert answer.lower() in piece.lower()
        assert sample.text.count(piece) == 1
        # Pieces differ in length: a share of the pieces is a share of the characters to within 10 %.
        assert sample.text.index(piece) / len(sample.text) == pytest.approx(depth, abs=0.1)


@pytest.mark.parametrize("task", ["single", "qa"])
def test_the_samples_of_a_task_cover_the_depths_evenly(task: str) -> None:
    found = [made(task, index).depths[0] for index in range(SAMPLES)]
    # A place is a whole number of pieces: one of 20 and more.
    assert found == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.05)


def test_several_keys_are_asked_in_turn() -> None:
    samples = [made("multikey", index) for index in range(SAMPLES)]
    assert [int(4 * sample.depths[0]) for sample in samples] == [0, 1, 2, 3]
    for sample in samples:  # the wrong answers are those of the other things in the text
        assert len(sample.wrong) == 3 and all(wrong in sample.text for (wrong,) in sample.wrong)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_wrong_answers_are_wrong_and_as_long(task: str) -> None:
    sample = made(task)
    assert len(sample.wrong) >= 2
    for wrong in sample.wrong:
        assert len(wrong) == len(sample.answers) and sample.found(", ".join(wrong)) == 0.0
    if task in ("single", "multikey", "multivalue", "variables"):
        sizes = {len(part) for answer in (sample.answers, *sample.wrong) for part in answer}
        assert len(sizes) == 1  # numbers of five digits, names of three letters


def test_the_chain_of_variables_leads_to_the_right_names() -> None:
    sample = made("variables")
    value = re.findall(r"value (\d+)", sample.question)[0]
    holds: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.text):
        holds[name] = holds.get(source, source)  # type: ignore[reportArgumentType]
    assert tuple(name for name, held in holds.items() if held == value) == sample.answers
    assert len(holds) == 6


@pytest.mark.parametrize("length", [60, 400, 3000])
def test_common_words_are_the_most_common(length: int) -> None:
    sample = made("common", length=length)
    counts = Counter(re.findall(r"\w+", sample.text))
    assert {word for word, _ in counts.most_common(3)} == {*sample.answers}
    assert tuple(word for word in counts if word in sample.answers) == sample.answers  # as they first appear
    blocks = len(sample.pieces)
    assert all(counts[word] == 2 * blocks for word in sample.answers)
    assert all(counts[word] <= -(-6 * blocks // 60) for word in counts if word not in sample.answers)


def test_the_questions_about_the_story_have_one_answer_each() -> None:
    sentences = tasks.story()
    for fact in tasks.FACTS:
        (there,) = (sentence for sentence in sentences if fact.clue in sentence)
        assert fact.answer.lower() in there.lower()
        assert not any(wrong.lower() in there.lower() for wrong in fact.wrong)
    asked = {made("qa", index).question for index in range(len(tasks.FACTS))}
    assert len(asked) == len(tasks.FACTS)


def test_a_text_longer_than_the_story_holds_all_of_it_in_order() -> None:
    sample = made("qa", length=8000)
    assert " ".join(tasks.story()) in sample.text


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_same_seed_makes_the_same_texts(task: str) -> None:
    assert made(task) == made(task)
    assert made(task, seed=1) != made(task) != made(task, index=2)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_longer_text_asks_the_same_question(task: str) -> None:
    short, long = made(task, length=150), made(task, length=600)
    for name in ("question", "lead", "answers", "wrong"):
        assert getattr(short, name) == getattr(long, name)
    assert not Counter(short.pieces) - Counter(long.pieces)


@pytest.mark.parametrize("length", [256, 1000])
@pytest.mark.parametrize("task", tasks.TASKS)
def test_texts_are_as_long_as_they_may_be(task: str, length: int) -> None:
    tokenizer = word_tokenizer()

    def count(sample: tasks.Sample) -> int:
        prompt = prompt_of(tokenizer, sample)
        return len(prompt.ids) + prompt.room

    sample = tasks.make(task, 0, SAMPLES, length, 0, count)
    # One more piece would be too long: a sentence of the story has up to 60 words and signs.
    assert length - 80 < count(sample) <= length


def test_a_length_that_the_question_fills_is_refused() -> None:
    with pytest.raises(CacheInputError, match="length=20.*'multikey'.*takes"):
        made("multikey", length=20)


@pytest.mark.parametrize(
    ("said", "share"),
    [("Anna, bob", 1.0), ("BOB and others", 0.5), ("anna's", 0.5), ("Hanna, bobs", 0.0), ("", 0.0)],
)
def test_parts_are_found_as_whole_words(said: str, share: float) -> None:
    sample = tasks.Sample("t", 0, ("x",), (0,), "?", "It is", ("Anna", '"Bob"'), ())
    assert sample.found(said) == share


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny.build("llama", max_position_embeddings=2048)


def make(model, *configs: KVCacheConfig):
    config = configs[0] if len(configs) == 1 else list(configs)
    return lambda: KVCacheBuilder.for_model(model, config, serve_standalone=True)


def test_the_models_own_cache_loses_nothing_and_coarse_codes_do(model) -> None:
    kivi = KVCacheConfig(method="kivi", bit_width_inlier=2, residual_length=0)
    snapkv = KVCacheConfig(method="snapkv", snap_budget=64)
    rows = {"own": lambda: make_prompt_cache(model), "kivi": make(model, kivi), "pair": make(model, snapkv, kivi)}
    ticks = []
    found = ruler(
        model, letters(), rows, lengths=[800], tasks=["single", "variables"], samples=2,
        progress=lambda done, total: ticks.append((done, total)),
    )  # fmt: skip
    none, own, kivi_row, pair = found.methods
    assert none.label == UNCOMPRESSED and none.ratio == 1.0
    assert own.scores == none.scores and all(score.delta == 0.0 for score in own.scores)
    for row in (kivi_row, pair):
        assert row.error is None and len(row.scores) == 4
        assert all(abs(score.delta) > 1e-6 for score in row.scores)
        assert [s.logprob - s.delta for s in row.scores] == pytest.approx([s.logprob for s in none.scores])
    assert kivi_row.ratio and pair.ratio and 2 < kivi_row.ratio < pair.ratio
    assert ticks == [(i + 1, 16) for i in range(16)]


def test_log_probabilities_are_those_of_the_whole_text(model) -> None:
    """Without a cache, all tokens at once: float32 sums in another order."""
    tokenizer = letters()
    found = ruler(model, tokenizer, {}, lengths=[600], tasks=["single"], samples=1)
    (score,) = found.methods[0].scores
    sample = tasks.make(
        "single", 0, 1, 600, 0, lambda s: len(prompt_of(tokenizer, s).ids) + prompt_of(tokenizer, s).room
    )
    prompt = prompt_of(tokenizer, sample)
    assert score.tokens == len(prompt.ids) and score.expected == tokenizer.decode(prompt.right).strip()

    def likely(answer: list[int]) -> float:
        logits = model(mx.array(prompt.ids + answer)[None])[0, len(prompt.ids) - 1 : -1].astype(mx.float32)
        rows = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        return float(rows[np.arange(len(answer)), answer].mean())

    right, rivals = likely(prompt.right), [likely(answer) for answer in prompt.wrong]
    assert score.logprob == pytest.approx(right, abs=1e-4)
    assert score.margin == pytest.approx(right - max(rivals), abs=1e-4)
    said = [int(token) for token, _ in generate_step(mx.array(prompt.ids), model, max_tokens=prompt.room)]
    assert score.said == tokenizer.decode(said).strip()


def test_a_right_answer_counts_as_said() -> None:
    """A model that repeats what stood after the last such token: it copies the number."""
    tokenizer = letters()

    class Copies:
        """Looks for the longest match of the text's end further up, and continues it."""

        def __init__(self) -> None:
            self.args = SimpleNamespace(max_position_embeddings=4096)

        def make_cache(self):
            return [Text()]

        def __call__(self, ids, cache):
            (text,) = cache
            text.ids += ids[0].tolist()
            end = next(n for n in range(40, -1, -1) if (at := self.before(text.ids, n)) is not None)
            at = self.before(text.ids, end) or 0
            return mx.where(mx.arange(tiny.VOCAB) == text.ids[at], 9.0, 0.0)[None, None]

        @staticmethod
        def before(ids, n):
            """Where the last ``n`` tokens of ``ids`` stood before: the index after them."""
            tail = ids[len(ids) - n :]
            return next((i for i in range(len(ids) - 1, n - 1, -1) if ids[i - n : i] == tail), None)

    class Text:
        state = ()

        def __init__(self) -> None:
            self.ids: list[int] = []

    found = ruler(Copies(), tokenizer, {}, lengths=[500, 1000], tasks=["single", "multikey"], samples=2)
    for cell in found.cells(found.methods[0]):
        assert (cell.match, cell.chosen, cell.samples) == (1.0, 1.0, 2)
    assert all(score.said == score.expected for score in found.methods[0].scores)


def test_a_method_that_raises_keeps_what_it_has_and_the_others_go_on(model) -> None:
    calls = []

    def fails():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no more")
        return make_prompt_cache(model)

    rows, partly = {"bad": fails, "good": lambda: make_prompt_cache(model)}, []
    found = ruler(model, letters(), rows, lengths=[500], tasks=["single"], samples=3, so_far=partly.append)
    _, bad, good = found.methods
    assert (len(bad.scores), bad.error, len(calls)) == (1, "RuntimeError: no more", 2)
    assert (len(good.scores), good.error) == (3, None)
    assert found.cells(bad)[0].samples == 1
    assert [[len(method.scores) for method in part.methods] for part in partly] == [[1, 1, 1], [2, 1, 2], [3, 1, 3]]
    assert partly[-1] == found


def test_results_are_reproducible_and_json(model) -> None:
    rows = {"kivi": make(model, KVCacheConfig(method="kivi", residual_length=0))}
    runs = [ruler(model, letters(), rows, lengths=[500], tasks=["qa"], samples=2, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]
    told = json.loads(runs[0].to_json(model="tiny"))
    assert told["model"] == "tiny" and told["format"] == 1 and told["seed"] == 3
    (cell,) = told["methods"][1]["cells"]
    scores = told["methods"][1]["scores"]
    assert cell["delta"] == pytest.approx(np.mean([score["delta"] for score in scores]))
    assert cell["chosen"] == np.mean([score["margin"] > 0 for score in scores])


class Joining:
    """A tokenizer whose tokens are pairs of characters: they reach over the end of the lead."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int.from_bytes(text[i : i + 2].encode(), "big") for i in range(0, len(text), 2)]


@pytest.mark.parametrize("lead", ["It is", "It was"])
def test_tokens_over_the_end_of_the_lead_belong_to_the_answer(lead: str) -> None:
    sample = tasks.Sample("t", 0, ("x",), (0,), "?", lead, ("abc",), (("xyz",),))
    prompt = prompt_of(Joining(), sample)
    for answer, text in ((prompt.right, "abc"), (prompt.wrong[0], "xyz")):
        ids = Joining().encode(f"{lead} {text}")
        assert (prompt.ids + answer)[-len(ids) :] == ids and answer


def test_a_chat_template_makes_the_question_a_users_message() -> None:
    seen = []

    class Chat(Joining):
        chat_template = "x"

        def apply_chat_template(self, messages, add_generation_prompt):
            seen.append((messages, add_generation_prompt))
            return [1, 2, 3]

    sample = tasks.Sample("t", 0, ("text.",), (0,), "Who?", "It is", ("abc",), (("xyz",),))
    assert prompt_of(Chat(), sample).ids[:3] == [1, 2, 3]
    ((message,), asks) = seen[0]
    assert asks and message["role"] == "user" and message["content"].endswith("text.\n\nWho?")


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_the_limit_of_a_model() -> None:
    def told(**fields):
        return SimpleNamespace(args=SimpleNamespace(**fields))

    assert longest(told(max_position_embeddings=2048)) == 2048
    assert longest(told(n_positions=1024, max_position_embeddings=None)) == 1024
    assert longest(told()) is None
    assert longest(SimpleNamespace(args=SimpleNamespace(), language_model=told(max_position_embeddings=7))) == 7


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"lengths": [4096]}, "lengths=4096.*1..2048, the model's limit"),
        ({"lengths": [0]}, "lengths=0"),
        ({"lengths": [512, 512]}, "each once"),
        ({"lengths": []}, "one or more"),
        ({"tasks": ["sing"]}, "tasks='sing'.*single, multikey"),
        ({"samples": 0}, "samples=0"),
    ],
)
def test_what_cannot_be_asked_is_refused(model, wrong: dict, match: str) -> None:
    with pytest.raises(QuantizerConfigError, match=match):
        ruler(model, letters(), {}, **wrong)


def test_the_label_of_the_reference_is_taken(model) -> None:
    with pytest.raises(CacheInputError, match="another label"):
        ruler(model, letters(), {UNCOMPRESSED: list})
