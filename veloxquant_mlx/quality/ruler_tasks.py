"""Texts of any length with questions about them: what ``quality.ruler`` asks a model.

The kinds of task are those of RULER (Hsieh et al. 2024, arXiv:2404.06654): facts planted in a text that says something
else, variables that are copies of each other, words that stand often in a list, questions about a story. All texts are
made here, from a seed. A sample has the same facts and the same question at every length: a longer text only has more
sentences around them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, cycle, islice, pairwise

from ..core.exceptions import CacheInputError

SLACK = 8  # tokens that the model may say beyond those of the right answer
KEYS, VALUES, CHAIN, COMMON = 4, 3, 3, 3
STRIDE = 4  # between the questions of samples that follow each other; no divisor of their number
BLOCK, RARE = 12, 60  # words of a block of the list, half of them common; rare words that take turns

_COLOURS: tuple[str, ...] = ("red", "blue", "green", "yellow", "white", "black", "silver", "golden", "purple", "orange")
_THINGS: tuple[str, ...] = (
    "lamp", "kettle", "drum", "bicycle", "piano", "mirror", "ladder", "suitcase",
    "umbrella", "violin", "helmet", "teapot", "carpet", "compass", "trumpet", "basket",
)  # fmt: skip
_WHEN = (
    "In the morning", "After the rain", "Late in the evening", "Every other week", "On quiet days", "Before lunch",
    "At the end of summer", "Now and then", "When the wind turns", "Long before dawn", "On market days", "Most winters",
)  # fmt: skip
_HOW = ("old", "quiet", "busy", "careful", "young", "tired", "cheerful", "patient", "proud", "sleepy", "clever", "shy")
_WHO = (
    "gardener", "teacher", "fisherman", "baker", "farmer", "doctor", "painter", "tailor", "miller", "sailor",
    "shepherd", "carpenter",
)  # fmt: skip
_DOES = (
    "walks slowly", "waits for a letter", "sings a song", "reads the paper", "talks to a neighbour", "rests a while",
    "looks for shells", "counts the boats", "tells a story", "drinks some tea", "feeds the birds", "sweeps the floor",
)  # fmt: skip
_WHERE = (
    "by the river", "near the bridge", "in the market", "under the trees", "on the hill", "behind the mill",
    "at the harbour", "beside the church", "along the beach", "in the valley", "across the square", "by the old wall",
)  # fmt: skip
_WORDS: tuple[str, ...] = (
    "apple", "bottle", "castle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket", "kitchen",
    "lemon", "market", "needle", "ocean", "pencil", "rabbit", "saddle", "table", "valley", "window", "yard", "anchor",
    "basket", "candle", "dragon", "eagle", "feather", "glove", "honey", "insect", "jungle", "kitten", "ladder",
    "monkey", "nest", "orange", "pillow", "river", "silver", "tunnel", "uncle", "village", "wagon", "barn", "cloud",
    "drum", "elbow", "fence", "goat", "hill", "ink", "jewel", "king", "leaf", "mirror", "night", "oven", "paper",
    "road", "snow", "tower", "wheel", "arrow", "bread",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """A question about the story; ``clue`` stands in the one sentence that answers it."""

    question: str
    lead: str
    answer: str
    clue: str
    wrong: tuple[str, str, str]


FACTS = (
    Fact("When does the ferry leave the mainland?", "The ferry leaves the mainland at", "half past six",
         "leaves the mainland once a day", ("ten past four", "quarter to nine", "half past eleven")),
    Fact("How many people live on Skarra?", "The number of people who live on Skarra is", "two hundred and eleven",
         "people live on Skarra", ("three hundred and forty", "one hundred and six", "ninety-eight")),
    Fact("How many children are in the school?", "The number of children in the school is", "nine",
         "There is one school", ("seven", "twelve", "four")),
    Fact("When does the bakery open?", "The bakery opens at", "five", "a bakery that opens", ("six", "seven", "eight")),
    Fact("What is the name of the inn?", "The inn is called the", "Lame Gull",
         "a small inn called", ("Red Anchor", "Old Whale", "Blue Heron")),
    Fact("What is the name of the parrot?", "The parrot is called", "Admiral",
         "a grey parrot called", ("Captain", "Pepper", "Professor")),
    Fact("What had Sofie studied in the city?", "In the city Sofie had studied", "bridges",
         "She had studied", ("medicine", "painting", "music")),
    Fact("Who keeps the lighthouse?", "The keeper of the lighthouse is", "Anton",
         "who kept the lighthouse", ("Henrik", "Admiral", "Ottilie")),
    Fact("How old is the lighthouse?", "The age of the lighthouse, in years, is", "one hundred and twenty-six",
         "years old", ("two hundred and eleven", "one hundred and sixty-two", "ninety-four")),
    Fact("What stone is the lighthouse built of?", "The lighthouse is built of", "granite",
         "came by ship from the north", ("marble", "brick", "slate")),
    Fact("How many steps does Anton climb?", "The number of steps that Anton climbs is", "one hundred and ninety",
         "hundred and ninety steps", ("two hundred and ten", "eighty-four", "one hundred and twenty")),
    Fact("What is the secret password of the lighthouse?", "The secret password of the lighthouse is", '"marigold"',
         "secret password", ('"lavender"', '"granite"', '"seagull"')),
    Fact("What was the cargo of the Ottilie?", "The cargo of the Ottilie was", "timber",
         "a coaster with a cargo", ("herring", "granite", "bread")),
    Fact("What did the farmer promise the sheep?", "The farmer promised the sheep", "turnips",
         "The sheep stood on top", ("bread", "apples", "almonds")),
    Fact("What was in the barrel that the postman found?", "The postman found a barrel of", "herring",
         "The postman found a barrel", ("turnips", "oil", "honey")),
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A text, a question and its right answer, which begins after ``lead``.

    ``pieces`` are the sentences of the text (the parts of a list), ``marks`` the indices of those that hold the
    answer. ``answers`` are the parts of the right answer in the order of the text; each of ``wrong`` is a wrong one.
    """

    task: str
    index: int
    pieces: tuple[str, ...]
    marks: tuple[int, ...]
    question: str
    lead: str
    answers: tuple[str, ...]
    wrong: tuple[tuple[str, ...], ...]

    @property
    def text(self) -> str:
        return " ".join(self.pieces)

    @property
    def depths(self) -> tuple[float, ...]:
        """Where the answer stands: 0 is the first piece of the text, 1 the last."""
        return tuple(mark / max(len(self.pieces) - 1, 1) for mark in self.marks)

    @property
    def right(self) -> str:
        return ", ".join(self.answers)

    def found(self, said: str) -> float:
        """The share of the answer's parts that stand in ``said`` as whole words, whatever their case."""
        parts = [part.strip('"') for part in self.answers]
        return sum(bool(re.search(rf"(?<!\w){re.escape(p)}(?!\w)", said, re.IGNORECASE)) for p in parts) / len(parts)


Build = Callable[[int], tuple[list[str], list[int]]]
"""Pieces and marks of a text with so many pieces beyond those that hold the answer."""


@dataclass(frozen=True)
class Draft:
    """A sample whose text has no length yet."""

    build: Build
    question: str
    lead: str
    answers: tuple[str, ...]
    wrong: tuple[tuple[str, ...], ...]

    def sample(self, task: str, index: int, n: int) -> Sample:
        pieces, marks = self.build(n)
        return Sample(task, index, tuple(pieces), tuple(marks), self.question, self.lead, self.answers, self.wrong)


class _Stream:
    """Pieces made one after the other, so that a longer text has the pieces of a shorter one."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self._made: list[str] = []

    def take(self, n: int) -> list[str]:
        self._made += islice(self._pieces, max(n - len(self._made), 0))
        return self._made[:n]


def _filler(rng: random.Random) -> Iterator[str]:
    """Sentences about nothing; neither a number nor a thing of the facts is in them."""
    own = random.Random(rng.random())
    while True:
        yield "{}, the {} {} {} {}.".format(*(own.choice(words) for words in (_WHEN, _HOW, _WHO, _DOES, _WHERE)))


def _planted(rng: random.Random, needles: Sequence[str], places: Sequence[float], answer: Sequence[int]) -> Build:
    """Filler with ``needles`` at ``places`` (shares of it, ascending); those numbered ``answer`` hold the answer."""
    filler = _Stream(_filler(rng))

    def build(n: int) -> tuple[list[str], list[int]]:
        slots, pieces = [round(place * n) for place in places], filler.take(n)
        for slot, needle in reversed([*zip(slots, needles, strict=True)]):
            pieces.insert(slot, needle)
        return pieces, [slots[i] + i for i in answer]

    return build


def _even(n: int) -> list[float]:
    return [(i + 0.5) / n for i in range(n)]


def _keys(rng: random.Random, n: int) -> list[str]:
    """Things of which no two have the same kind or colour."""
    return [f"{c} {t}" for c, t in zip(rng.sample(_COLOURS, n), rng.sample(_THINGS, n), strict=True)]


def _numbers(rng: random.Random, n: int) -> list[str]:
    return [str(number) for number in rng.sample(range(10000, 100000), n)]


def _single(rng: random.Random, place: float, turn: int) -> Draft:
    """One fact; wrong answers are numbers that the text does not have."""
    (key,), (right, *wrong) = _keys(rng, 1), _numbers(rng, 4)
    build = _planted(rng, [f"The secret number of the {key} is {right}."], [place], [0])
    question, lead = f"What is the secret number of the {key}?", f"The secret number of the {key} is"
    return Draft(build, question, lead, (right,), tuple((w,) for w in wrong))


def _multikey(rng: random.Random, place: float, turn: int) -> Draft:
    """Facts about several things; wrong answers are the numbers of the others."""
    keys, values, asked = _keys(rng, KEYS), _numbers(rng, KEYS), int(place * KEYS)
    needles = [f"The secret number of the {k} is {v}." for k, v in zip(keys, values, strict=True)]
    question, lead = f"What is the secret number of the {keys[asked]}?", f"The secret number of the {keys[asked]} is"
    wrong = tuple((v,) for i, v in enumerate(values) if i != asked)
    return Draft(_planted(rng, needles, _even(KEYS), [asked]), question, lead, (values[asked],), wrong)


def _order(rng: random.Random, n: int) -> tuple[list[int], list[int]]:
    """Two groups of ``n`` things in one seeded order: who comes when, and the places of the first group."""
    owners = [0] * n + [1] * n
    rng.shuffle(owners)
    return owners, [i for i, owner in enumerate(owners) if owner == 0]


def _multivalue(rng: random.Random, place: float, turn: int) -> Draft:
    """Several numbers of one thing, as many of another."""
    keys, values = _keys(rng, 2), _numbers(rng, 3 * VALUES)
    (owners, mine), rest = _order(rng, VALUES), [iter(values[:VALUES]), iter(values[VALUES : 2 * VALUES])]
    needles = [f"A secret number of the {keys[owner]} is {next(rest[owner])}." for owner in owners]
    question = f"What are the {VALUES} secret numbers of the {keys[0]}, in the order of the text?"
    wrong = (tuple(values[VALUES : 2 * VALUES]), tuple(values[2 * VALUES :]))
    build = _planted(rng, needles, _even(2 * VALUES), mine)
    return Draft(build, question, f"The secret numbers of the {keys[0]} are", tuple(values[:VALUES]), wrong)


def _variables(rng: random.Random, place: float, turn: int) -> Draft:
    """Two chains of variables, each a copy of the one before it."""
    names = ["".join(letters) for letters in _letters(rng, 3 * CHAIN)]
    chains, values = (names[:CHAIN], names[CHAIN : 2 * CHAIN]), _numbers(rng, 2)
    owners, mine = _order(rng, CHAIN)
    lines = [iter(_copies(*one)) for one in zip(chains, values, strict=True)]
    needles = [next(lines[owner]) for owner in owners]
    question = (
        "A line such as VAR B = VAR A gives B the value of A. "
        f"Which {CHAIN} variables have the value {values[0]}, in the order of the text?"
    )
    build = _planted(rng, needles, _even(2 * CHAIN), mine)
    wrong = (tuple(chains[1]), tuple(names[2 * CHAIN :]))
    return Draft(build, question, f"The variables with the value {values[0]} are", tuple(chains[0]), wrong)


def _copies(names: list[str], value: str) -> list[str]:
    """The lines that give all ``names`` one value."""
    return [f"VAR {names[0]} = {value}.", *(f"VAR {b} = VAR {a}." for a, b in pairwise(names))]


def _letters(rng: random.Random, n: int) -> list[list[str]]:
    """Names of three letters that share none at the same place."""
    columns = [rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", n) for _ in range(3)]
    return [list(name) for name in zip(*columns, strict=True)]


def _common(rng: random.Random, place: float, turn: int) -> Draft:
    """A list in which three words stand 20 times as often as any other; wrong answers are three of those."""
    words = rng.sample(_WORDS, COMMON + RARE)
    common, rare = words[:COMMON], words[COMMON:]
    blocks = _Stream(_blocks(common, rare, random.Random(rng.random())))
    first = re.findall(r"\w+", blocks.take(1)[0])
    question = (
        f"{COMMON} words stand far more often in the list than all others. "
        "Which, in the order in which they first appear?"
    )
    return Draft(
        lambda n: (blocks.take(n + 1), []),  # all of the common words are in the first block already
        question,
        "The words that stand most often are",
        tuple(sorted(common, key=first.index)),
        tuple(tuple(rare[i : i + COMMON]) for i in range(0, 3 * COMMON, COMMON)),
    )


def _blocks(common: list[str], rare: list[str], rng: random.Random) -> Iterator[str]:
    """Parts of a list: half of the words of each are common, the other half are the next of the rare ones."""
    half, turn = BLOCK // 2, cycle(rare)
    while True:
        listed = common * (half // COMMON) + [*islice(turn, half)]
        rng.shuffle(listed)
        yield ", ".join(listed) + ","


def story() -> list[str]:
    """The sentences of the story that comes with the package."""
    text = (files("veloxquant_mlx") / "cli" / "passage.txt").read_text(encoding="utf-8")
    return re.split(r"(?<=[.!?])\s+", text.strip())


def _question_answering(rng: random.Random, place: float, turn: int) -> Draft:
    """A question about the story: the sentence that answers it, what stands around it there, and then filler."""
    fact, sentences = FACTS[STRIDE * turn % len(FACTS)], story()
    at = next(i for i, sentence in enumerate(sentences) if fact.clue in sentence)
    before = _Stream(chain(reversed(sentences[:at]), _filler(rng)))
    after = _Stream(chain(sentences[at + 1 :], _filler(rng)))

    def build(n: int) -> tuple[list[str], list[int]]:
        ahead = round(place * n)
        return [*reversed(before.take(ahead)), sentences[at], *after.take(n - ahead)], [ahead]

    return Draft(build, fact.question, fact.lead, (fact.answer,), tuple((w,) for w in fact.wrong))


TASKS: dict[str, Callable[[random.Random, float, int], Draft]] = {
    "single": _single,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "variables": _variables,
    "common": _common,
    "qa": _question_answering,
}


def make(task: str, index: int, samples: int, length: int, seed: int, count: Callable[[Sample], int]) -> Sample:
    """Sample ``index`` of ``samples`` with the longest text for which ``count(sample)``, in tokens, is <= ``length``.

    Raises ``CacheInputError`` where not even the shortest text fits.
    """
    draft = TASKS[task](random.Random(f"{seed}/{task}/{index}"), (index + 0.5) / samples, seed + index)

    def fits(n: int) -> bool:
        return count(draft.sample(task, index, n)) <= length

    if not fits(0):
        raise CacheInputError(
            f"length={length} cannot be used for the task {task!r}: its question alone takes "
            f"{count(draft.sample(task, index, 0))} tokens. Take a longer one."
        )
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return draft.sample(task, index, low)
