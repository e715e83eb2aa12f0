"""Needles and repeated sequences: planted where they should be, asked for without a trace, the same for a seed."""

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.models import tiny
from veloxquant_mlx.core.exceptions import CacheInputError
from veloxquant_mlx.quality import probes

BOS = 1
STORY = "The boat left at dawn. Nobody saw it go! Was it late? The mail came at noon. " * 20


def tokenizer(bos=None):
    """A token for every character."""
    head = [] if bos is None else [bos]
    return SimpleNamespace(encode=lambda text: head + [ord(c) for c in text], bos_token_id=bos)


def text_of(ids):
    return "".join(map(chr, ids))


def build(length=900, bos=None, **how):
    return probes.build(tokenizer(bos), STORY, length, **{"depths": (0.0, 0.5, 1.0), "keys": ("number", "word"), **how})


def test_every_needle_is_there_once_with_its_answer_and_at_its_depth():
    trial = build()
    text = text_of(trial.prompt)
    assert len(trial.prompt) == 900 and text.endswith(probes.REQUEST)
    where = []
    for row in trial.needles:
        for question in row:
            fact = text_of(question.ids) + text_of(question.answer) + "."
            assert text.count(fact) == text.count(text_of(question.ids)) == 1
            where.append(text.index(fact))
    assert where == sorted(where)
    # Shares of the text without what is planted: a needle stands before the sentence that would pass its depth.
    assert where[0] < 5 and 0.3 < where[2] / 900 < 0.6 and where[-1] > 900 - len(probes.REQUEST) - 50
    assert {text_of(q.ids).split()[2] for q in trial.needles[0]} == {"number", "word"}
    answers = [text_of(q.answer) for row in trial.needles for q in row]
    assert len(set(answers)) == 6 and all(a[1:].isdigit() for a in answers[::2])


def test_the_sequence_to_repeat_is_there_once_and_known_by_its_beginning():
    trial = build()
    whole = trial.repeat.ids + trial.repeat.answer
    assert len(trial.repeat.ids) == probes.COPY_CUE and len(trial.repeat.answer) == probes.COPY_SCORED
    assert text_of(trial.prompt).count(text_of(whole)) == 1


def test_what_a_tokenizer_puts_in_front_comes_once():
    trial = build(bos=BOS)
    assert trial.prompt[0] == BOS and trial.prompt.count(BOS) == 1 and len(trial.prompt) == 900
    assert all(BOS not in q.ids + q.answer for row in trial.needles for q in row)


def test_an_answer_that_melts_into_its_question_is_split_anyway():
    pairs = SimpleNamespace(encode=lambda text: [ord(a) for a in text[::2]], bos_token_id=None)
    odd = probes.Encoder(pairs).question("abc", "def")
    assert (text_of(odd.ids), text_of(odd.answer)) == ("ac", "e")
    merged = SimpleNamespace(encode=lambda text: [len(text)], bos_token_id=None)
    assert probes.Encoder(merged).question("abc", "de") == probes.Question((3,), (2,))


def test_the_same_seed_plants_the_same_and_another_seed_others():
    assert build(seed=3) == build(seed=3)
    assert build(seed=3).needles != build(seed=4).needles


def test_a_short_text_is_repeated():
    trial = probes.build(tokenizer(), "Rain. Wind.", 600, depths=(0.5,), keys=("word",))
    assert len(trial.prompt) == 600 and text_of(trial.prompt).count("Rain.") > 10


@pytest.mark.parametrize(
    ("how", "told"), [({"length": 300}, "6 needles do not fit into 300"), ({"keys": ("word",) * 9}, "at most 20")]
)
def test_needles_that_do_not_fit_are_refused(how, told):
    with pytest.raises(CacheInputError, match=told):
        build(**how)


class Knows:
    """A model that goes on with whatever followed the last three tokens when it read them first."""

    def __init__(self, blind_after=10**9):
        self.blind_after = blind_after

    def __call__(self, ids, cache):
        (cache,) = cache
        out = []
        for token in ids[0].tolist():
            cache.read.append(token)
            seen = cache.read[: self.blind_after] + [0] * 3 + cache.read[-3:]
            text, key = text_of(seen), text_of(cache.read[-3:])
            at = text.find(key)
            out.append(ord(text[at + 3]) if 0 <= at < len(text) - 3 else 0)
        return (mx.arange(128) == mx.array(out)[:, None]).astype(mx.float32)[None]


def memory():
    return [SimpleNamespace(read=[], state=mx.array(0))]


def trial_of(prompt, needles, repeat):
    return probes.Trial(prompt, needles, repeat, tuple(range(sum(map(len, needles)))), (ord("\n"),))


@pytest.mark.parametrize(("blind_after", "repeated"), [(10**9, 1.0), (10, 0.0)])
def test_a_sequence_that_was_read_is_repeated_and_one_that_was_not_is_not(blind_after, repeated):
    rare = tuple(range(100, 127))
    trial = trial_of((*map(ord, STORY[:50]), *rare), (), probes.Question(rare[:4], rare[4:]))
    assert probes.run(Knows(blind_after), memory(), trial).repeat == repeated


def test_one_wrong_token_of_an_answer_is_no_answer():
    fact = tuple(map(ord, "KEY=9137."))
    right = probes.Question(fact[:4], fact[4:])
    wrong = probes.Question(fact[:4], (*fact[4:-1], ord("!")))
    trial = trial_of((*fact, *map(ord, "abcdefgh")), ((right, wrong), (wrong, right)), right)
    mixed = replace(trial, order=(2, 0, 3, 1))
    for one in (trial, mixed):
        assert probes.run(Knows(), memory(), one).needles == ((1.0, 0.0), (0.0, 1.0))


def test_the_turn_asks_everything_once_and_knows_where_the_answers_are():
    trial = build()
    fed, where = trial.turn()
    asked = [*(q for row in trial.needles for q in row), trial.repeat]
    assert [tuple(fed[at]) for at in where] == [q.answer for q in asked]
    assert all(tuple(fed[at.start - len(q.ids) : at.start]) == q.ids for at, q in zip(where, asked, strict=True))
    assert text_of(fed).count("The secret") == 6 and sorted(trial.order) == list(range(6)) != list(trial.order)
    assert build(seed=1).order != build(seed=2).order


def test_every_token_is_told_and_the_prompt_ends_with_a_token_alone():
    model, told, lengths = tiny.build("llama"), [], []
    trial = build()

    def watched(ids, cache):
        lengths.append(ids.shape[1])
        return model(ids, cache=cache)

    probes.run(watched, make_prompt_cache(model), trial, step=400, progress=told.append)
    assert lengths == told == [400, 400, 99, 1, len(trial.turn()[0]) - 1]
    assert sum(told) == probes.tokens_of(trial)
