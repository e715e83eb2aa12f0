"""How well a model uses a long text with compressed caches: a suite like RULER's (Hsieh et al. 2024, arXiv:2404.06654).

Everything is generated locally from a seed (``ruler_tasks``). The model reads a prompt as mlx_lm feeds it, its last
token alone, so that every answer is read from what the cache holds. Then the right and the wrong answers are scored by
their log-probability, token by token, and the model answers greedily; all on copies of one cache.
"""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from statistics import fmean
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from .. import __version__
from ..cache.report import cache_report
from ..core.exceptions import CacheInputError
from ..core.types import is_int
from ..methods._method import refuse
from ..models.inspect import language_models
from .measure import bytes_16, store_as
from .ruler_tasks import SLACK, TASKS, Sample, make

FORMAT = 1
UNCOMPRESSED = "uncompressed"
HEAD = "Read this text. A question about it follows."
_LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")

Factory = Callable[[], list[Any]]
"""Makes the empty caches of one method, as ``KVCacheBuilder.for_model`` does."""


@dataclass(frozen=True)
class Score:
    """One question. ``logprob`` is that of the right answer, in nats per token.

    ``delta`` is what the cache lost of it against the uncompressed one (below 0: less likely). ``margin`` is by how
    much the right answer is likelier than the likeliest wrong one. ``match`` is the share of its parts in the greedy
    answer, ``said``.
    """

    task: str
    length: int
    index: int
    depths: tuple[float, ...]
    tokens: int
    logprob: float
    delta: float
    margin: float
    match: float
    expected: str
    said: str


@dataclass(frozen=True)
class Cell:
    """Means over the samples of a task at a length; ``chosen`` is the share whose right answer was the likeliest."""

    task: str
    length: int
    samples: int
    match: float
    chosen: float
    delta: float
    logprob: float


@dataclass(frozen=True)
class Method:
    """All scores of one cache. ``ratio``: how many times smaller than 16-bit K/V it was after the longest prompt.

    ``error`` says why there are no further scores.
    """

    label: str
    scores: tuple[Score, ...] = ()
    ratio: float | None = None
    error: str | None = None

    def cell(self, task: str, length: int) -> Cell | None:
        """What was measured there; None where nothing was."""
        found = [s for s in self.scores if (s.task, s.length) == (task, length)]
        if not found:
            return None
        chosen = fmean(s.margin > 0 for s in found)
        match, delta, logprob = (fmean(getattr(s, name) for s in found) for name in ("match", "delta", "logprob"))
        return Cell(task, length, len(found), match, chosen, delta, logprob)


@dataclass(frozen=True)
class Ruler:
    """The methods, the uncompressed cache first, over ``tasks`` x ``lengths``."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    methods: tuple[Method, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    def cells(self, method: Method) -> list[Cell]:
        found = (method.cell(task, length) for task in self.tasks for length in self.lengths)
        return [cell for cell in found if cell is not None]

    def to_json(self, **more: Any) -> str:
        """Everything, the means included; ``more`` are further fields, such as the model's name."""
        told = {"format": FORMAT, **more, **asdict(self)}
        for row, method in zip(told["methods"], self.methods, strict=True):
            row["cells"] = [asdict(cell) for cell in self.cells(method)]
        return json.dumps(told, indent=1, allow_nan=False) + "\n"


class Prompt(NamedTuple):
    """Token ids of everything before the answer, of the right answer and of each wrong one."""

    ids: list[int]
    right: list[int]
    wrong: list[list[int]]

    @property
    def room(self) -> int:
        """Tokens that a greedy answer may have."""
        return len(self.right) + SLACK


def prompt_of(tokenizer: Any, sample: Sample) -> Prompt:
    """``sample`` in the tokens of ``tokenizer``, as a user's message where it has a chat template."""
    asked = f"{HEAD}\n\n{sample.text}\n\n{sample.question}"
    if tokenizer.chat_template is None:
        head = list(tokenizer.encode(asked + "\n"))
    else:
        message = [{"role": "user", "content": asked}]
        head = list(tokenizer.apply_chat_template(message, add_generation_prompt=True))
    lead = _encode(tokenizer, sample.lead)
    answers = [_encode(tokenizer, f"{sample.lead} {', '.join(parts)}") for parts in (sample.answers, *sample.wrong)]
    # Where a tokenizer joins tokens over the end of the lead, the answers begin with the first token that differs.
    shared = next((i for i, ids in enumerate(zip(lead, *answers, strict=False)) if len({*ids}) > 1), len(lead))
    right, *wrong = (answer[shared:] for answer in answers)
    return Prompt(head + lead[:shared], right, wrong)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def longest(model: Any) -> int | None:
    """The most tokens that ``model`` was made for, as configured; None where it does not say."""
    owners = [model, *language_models(model)]
    told = [getattr(m, name, None) for m in owners for name in ("args", "config")]
    values = [getattr(args, name, None) for args in told for name in _LIMITS]
    return next((v for v in values if is_int(v) and v > 0), None)


def ruler(
    model: Any,
    tokenizer: Any,
    factories: Mapping[str, Factory],
    *,
    lengths: Sequence[int] = (512, 1024),
    tasks: Sequence[str] = tuple(TASKS),
    samples: int = 4,
    seed: int = 0,
    kv_dtype: mx.Dtype | None = None,
    step: int = 2048,
    progress: Callable[[int, int], None] | None = None,
    so_far: Callable[[Ruler], None] | None = None,
) -> Ruler:
    """Ask every question with the model's own cache and with those of every factory (by label).

    ``lengths`` are tokens, prompt and answer together. ``kv_dtype``: compressed caches receive K and V in it (see
    ``measure``). ``progress`` gets the passes done and the passes in all, ``so_far`` what there is after a question. A
    method that raises keeps the scores that it has and its error, and the others go on.
    """
    check(model, lengths, tasks, samples, factories)
    methods = {label: Method(label) for label in (UNCOMPRESSED, *factories)}
    versions = {name: version(name) for name in ("mlx", "mlx-lm")}
    versions |= {"veloxquant-mlx": __version__, "python": platform.python_version()}
    passes, done = len(lengths) * len(tasks) * samples * len(methods), 0

    def found() -> Ruler:
        return Ruler(tuple(tasks), tuple(sorted(lengths)), samples, seed, tuple(methods.values()), versions)

    for sample, length in _samples(tokenizer, lengths, tasks, samples, seed):
        own, truth = make_prompt_cache(model), None
        for label, method in methods.items():
            if label == UNCOMPRESSED:
                truth = _ask(model, tokenizer, own, sample, length, step)
                methods[label] = replace(method, scores=(*method.scores, truth), ratio=1.0)
            elif method.error is None:
                try:
                    caches = factories[label]()
                    if kv_dtype is not None:
                        store_as(caches, kv_dtype)
                    score = _ask(model, tokenizer, caches, sample, length, step, truth)
                    ratio = bytes_16(own) / cache_report(caches).nbytes
                    methods[label] = replace(method, scores=(*method.scores, score), ratio=ratio)
                except Exception as error:
                    methods[label] = replace(method, error=f"{type(error).__name__}: {error}")
            done += 1
            if progress is not None:
                progress(done, passes)
        if so_far is not None:
            so_far(found())
    return found()


def check(
    model: Any, lengths: Sequence[int], tasks: Sequence[str], samples: int, factories: Mapping[str, Factory]
) -> None:
    """Refuse what cannot be asked of ``model``, with the valid values."""
    limit = longest(model)
    for length in lengths:
        if not is_int(length) or length < 1 or (limit is not None and length > limit):
            valid = "positive" if limit is None else f"in 1..{limit}, the model's limit"
            refuse("lengths", length, f"an int, {valid}", "Take others.")
    for task in tasks:
        if task not in TASKS:
            refuse("tasks", task, f"one of {', '.join(TASKS)}", "Name one or more of them.")
    for name, given in (("lengths", lengths), ("tasks", tasks)):
        if not given or len(set(given)) < len(given):
            refuse(name, tuple(given), "one or more, each once", "Change it.")
    if not is_int(samples) or samples < 1:
        refuse("samples", samples, "an int >= 1", "Take 4 for a first look.")
    if UNCOMPRESSED in factories:
        raise CacheInputError(f"{UNCOMPRESSED!r} is measured in any case: give the factory another label.")


def _samples(
    tokenizer: Any, lengths: Sequence[int], tasks: Sequence[str], samples: int, seed: int
) -> Iterator[tuple[Sample, int]]:
    """All questions, the short ones first, each with its length."""

    def count(sample: Sample) -> int:
        prompt = prompt_of(tokenizer, sample)
        return len(prompt.ids) + prompt.room

    for length in sorted(lengths):
        for task in tasks:
            for index in range(samples):
                yield make(task, index, samples, length, seed, count), length


def _ask(
    model: Any,
    tokenizer: Any,
    caches: list[Any],
    sample: Sample,
    length: int,
    step: int,
    truth: Score | None = None,
) -> Score:
    """One question with ``caches``, which hold the prompt afterwards; ``truth`` is what the uncompressed one scored."""
    prompt = prompt_of(tokenizer, sample)
    last = len(prompt.ids) - 1
    for start in range(0, last, step):
        model(mx.array(prompt.ids[start : min(start + step, last)])[None], cache=caches)
        mx.eval([c.state for c in caches])
    first = _next(model, caches, prompt.ids[-1])
    likely, firmly = _logprob(model, caches, first, prompt.right)
    rivals = [_logprob(model, caches, first, answer)[0] for answer in prompt.wrong]
    if firmly:  # the greedy walk is the right answer: it was just walked
        said = sample.right
    else:
        said = tokenizer.decode(_greedy(model, caches, first, prompt.room, tokenizer.eos_token_ids)).strip()
    return Score(
        task=sample.task,
        length=length,
        index=sample.index,
        depths=sample.depths,
        tokens=len(prompt.ids),
        logprob=likely,
        delta=0.0 if truth is None else likely - truth.logprob,
        margin=likely - max(rivals),
        match=sample.found(said),
        expected=sample.right,
        said=said,
    )


def _next(model: Any, caches: list[Any], token: int) -> np.ndarray:
    """Log-probabilities ``(vocabulary,)`` float32 of what follows ``token``."""
    row = model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32)
    return np.array(row - mx.logsumexp(row))


def _logprob(model: Any, caches: list[Any], first: np.ndarray, answer: list[int]) -> tuple[float, bool]:
    """Mean log-probability of the tokens of ``answer``, and whether greedy decoding would say it."""
    row, branch, total, greedy = first, copy.deepcopy(caches), 0.0, True
    for i, token in enumerate(answer):
        if i:
            row = _next(model, branch, answer[i - 1])
        total += float(row[token])
        greedy = greedy and int(row.argmax()) == token
    return total / len(answer), greedy


def _greedy(model: Any, caches: list[Any], first: np.ndarray, most: int, ends: Sequence[int]) -> list[int]:
    """The likeliest tokens one by one, until the model ends its answer."""
    row, branch, out = first, copy.deepcopy(caches), []
    while len(out) < most and (token := int(row.argmax())) not in ends:
        out.append(token)
        if len(out) < most:
            row = _next(model, branch, token)
    return out
