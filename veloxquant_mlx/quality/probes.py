"""What a model can still find in a compressed cache: planted facts (needles), and a random sequence to go on with.

All of them stand in one long text, which is read once. Questions come after the prompt has ended, as the turns of a
conversation do: a method that drops tokens cannot know what will be asked; the prompt ends with a general request.
They come in one call, each followed by its right answer, which says nothing about the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.exceptions import CacheInputError

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
KEYS = ("number", "word")
COPY_DEPTH, COPY_CUE, COPY_SCORED = 0.4, 8, 24
MOST = 2 / 3  # share of a text that may be planted
PIECE = 40  # most tokens between two places where a needle can stand
REQUEST = "\n\nHere are the secret numbers and the secret words again:\n"
PLACES = (
    "harbor",
    "museum",
    "bakery",
    "castle",
    "garden",
    "station",
    "library",
    "theater",
    "mill",
    "bridge",
    "chapel",
    "market",
    "tower",
    "school",
    "orchard",
    "tavern",
    "factory",
    "palace",
    "stable",
    "forge",
)
WORDS = (
    "silver",
    "tiger",
    "candle",
    "marble",
    "thunder",
    "ribbon",
    "copper",
    "falcon",
    "lemon",
    "velvet",
    "anchor",
    "pepper",
    "violin",
    "magnet",
    "walnut",
    "dragon",
    "cactus",
    "pilot",
    "jacket",
    "meadow",
)

Progress = Callable[[int], None]
"""Called with the tokens read since the last call."""


@dataclass(frozen=True)
class Question:
    """Token ids that are fed and those that must come next."""

    ids: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """One text: ``prompt`` with everything planted, ``needles[depth][key]`` to ask for, and the sequence to go on with.

    ``repeat`` asks for a random sequence: its first tokens are the question, the others its answer. Needles are asked
    for in ``order``, that of their depth by depth; ``end`` follows their answers.
    """

    prompt: tuple[int, ...]
    needles: tuple[tuple[Question, ...], ...]
    repeat: Question
    order: tuple[int, ...]
    end: tuple[int, ...]

    def turn(self) -> tuple[list[int], list[slice]]:
        """The tokens of all questions and answers, and where every answer is in them: the needles', the repetition."""
        fed: list[int] = []
        asked = [question for row in self.needles for question in row]
        where = [slice(0)] * len(asked)
        for i in self.order:
            fed += asked[i].ids
            where[i] = slice(len(fed), len(fed) + len(asked[i].answer))
            fed += (*asked[i].answer, *self.end)
        fed += self.repeat.ids
        return [*fed, *self.repeat.answer], [*where, slice(len(fed), len(fed) + len(self.repeat.answer))]


@dataclass(frozen=True)
class Answers:
    """``needles[depth][key]``: 1.0 where the whole answer was the model's first choice; ``repeat``: share of tokens."""

    needles: tuple[tuple[float, ...], ...]
    repeat: float


class Encoder:
    """A tokenizer for pieces of text: what it puts in front of every text is ``head``, once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        bos, first = getattr(tokenizer, "bos_token_id", None), list(tokenizer.encode("a"))[:1]
        self.head = tuple(first) if first and first[0] == bos else ()

    def __call__(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))[len(self.head) :]

    def question(self, asked: str, answer: str) -> Question:
        """``asked`` is followed by ``answer``, split where the tokens of ``asked`` alone end."""
        ids, both = self(asked), self(asked + answer)
        return Question(ids, both[len(ids) :] if both[: len(ids)] == ids else self(answer))


def build(
    tokenizer: Any,
    text: str,
    length: int,
    *,
    depths: Sequence[float] = DEPTHS,
    keys: Sequence[str] = KEYS,
    seed: int = 0,
) -> Trial:
    """A text of ``length`` tokens out of ``text`` with a needle for every depth and key, drawn by seed and length.

    Raises ``CacheInputError`` where needles would be more than ``MOST`` of it.
    """
    if len(depths) * len(keys) > min(len(PLACES), len(WORDS)):
        raise CacheInputError(f"{len(depths)} depths x {len(keys)} keys; valid: at most {len(PLACES)} needles.")
    encode, draw = Encoder(tokenizer), np.random.default_rng([seed, length])
    places, words = iter(draw.permutation(PLACES).tolist()), iter(draw.permutation(WORDS).tolist())
    planted, needles = [], []
    for depth in depths:
        needles.append([])
        for key in keys:
            asked = f"The secret {key} of the {next(places)} is"
            answer = f" {draw.integers(100, 1000)}" if key == "number" else f" {next(words)}"
            planted.append((depth, encode(f" {asked}{answer}.")))
            needles[-1].append(encode.question(asked, answer))
    pieces = _pieces(encode, text)
    known = np.unique([i for piece in pieces for i in piece])
    size = COPY_CUE + COPY_SCORED
    drawn = tuple(draw.choice(known, size, replace=len(known) < size).tolist())
    planted.append((COPY_DEPTH, drawn))
    request = encode(REQUEST)
    room = length - len(encode.head) - len(request) - sum(len(ids) for _, ids in planted)
    if room < (1 - MOST) * length:
        raise CacheInputError(
            f"{len(depths) * len(keys)} needles do not fit into {length} tokens: they and the questions take "
            f"{length - room}, more than {MOST:.0%}. Use a longer text, or fewer depths or keys."
        )
    prompt = (*encode.head, *_planted(pieces, room, planted), *request)
    order = tuple(draw.permutation(len(depths) * len(keys)).tolist())
    repeat = Question(drawn[:COPY_CUE], drawn[COPY_CUE:])
    return Trial(prompt, tuple(map(tuple, needles)), repeat, order, encode(".\n"))


def run(model: Any, caches: list[Any], trial: Trial, *, step: int = 512, progress: Progress | None = None) -> Answers:
    """Read the prompt into empty ``caches``, as mlx_lm does, then ask everything.

    A token of an answer counts where it is the model's first choice after the right ones before it: all of them do
    exactly where greedy decoding would give the answer.
    """
    ids, tell = mx.array(trial.prompt)[None], progress or (lambda count: None)
    last = len(trial.prompt) - 1
    for start, stop in [*((i, min(i + step, last)) for i in range(0, last, step)), (last, last + 1)]:
        model(ids[:, start:stop], cache=caches)  # no logits: only what is evaluated is computed
        mx.eval([cache.state for cache in caches])
        tell(stop - start)
    fed, where = trial.turn()
    choices = mx.argmax(model(mx.array(fed[:-1])[None], cache=caches)[0], axis=-1)
    right = np.array(choices) == np.array(fed[1:])
    tell(len(fed) - 1)
    said = [right[at.start - 1 : at.stop - 1] for at in where]
    found, keys = [float(part.all()) for part in said[:-1]], len(trial.needles[0]) if trial.needles else 1
    needles = tuple(tuple(found[i : i + keys]) for i in range(0, len(found), keys))
    return Answers(needles, float(said[-1].mean()))


def tokens_of(trial: Trial) -> int:
    """Tokens that ``run`` feeds."""
    return len(trial.prompt) + len(trial.turn()[0]) - 1


def _pieces(encode: Encoder, text: str) -> list[tuple[int, ...]]:
    """The sentences of ``text`` as token ids, long ones in parts."""
    sentences = [encode((" " if i else "") + s) for i, s in enumerate(re.split(r"(?<=[.!?])\s+", text.strip()))]
    return [s[i : i + PIECE] for s in sentences for i in range(0, len(s), PIECE)]


def _planted(
    pieces: Sequence[tuple[int, ...]], room: int, planted: Sequence[tuple[float, tuple[int, ...]]]
) -> list[int]:
    """The first ``room`` tokens of ``pieces``, repeated where they are fewer, with each insert before a piece."""
    out: list[int] = []
    waiting, used, at = sorted(planted, key=lambda entry: entry[0]), 0, 0
    while used < room or waiting:
        while waiting and used >= waiting[0][0] * room:
            out += waiting.pop(0)[1]
        piece = pieces[at % len(pieces)][: room - used]
        out, used, at = [*out, *piece], used + len(piece), at + 1
    return out
