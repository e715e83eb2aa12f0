"""``veloxquant demo``: one question over a long passage, asked with compressed caches on a real model."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..cache.base import KVCacheBuilder, KVCacheConfig
from ..coordinators.reconstruction import remember_tokenizer
from ..core.exceptions import QuantizerConfigError
from ..core.text import size
from ..models.gguf import SOURCES, ensure_model
from ..quality import Measurement, Reference, measure, reference, store_as
from ..quality.measure import compare
from ..quality.plans import SHORT, SHOWN, Shown
from .generate import load, prompt_ids

QUESTION = "What is the secret password of the lighthouse?"
FACT = "marigold"
SCORED = 64  # tokens at the end of the passage whose predictions are compared
CHUNK = 512  # tokens of the prompt at a time: mlx_lm takes 2,048, fewer keep the progress bars lively
WIDE = 118  # columns from which the answers stand in the table
ANSWER = 24  # most tokens of an answer

NOTES = {
    "streaming_llm": "keeps the first 4 tokens and the newest 508, by design: the password stands before those",
    "snapkv": "keeps the tokens that the question attends to; in the scored passage it cannot know what comes",
    "minicache": "finds the heads of neighbouring layers of this model too different, and leaves all rows as they came",
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    label: str
    method: str
    measured: Measurement
    answer: str

    @property
    def right(self) -> bool:
        return FACT in self.answer.lower()


def passage() -> str:
    """The story that the model reads."""
    return files("veloxquant_mlx.cli").joinpath("passage.txt").read_text(encoding="utf-8").strip()


def chosen(methods: str | None, every: bool) -> Shown:
    """The rows of ``SHOWN`` of the methods named, separated by commas; without names all, or those of ``SHORT``.

    :raises QuantizerConfigError: a name that has no row, or names and ``every`` at once.
    """
    if methods is None:
        return tuple(row for row in SHOWN if every or row[0] in SHORT)
    if every:
        raise QuantizerConfigError("--methods cannot be used with --all. Leave one out.")
    names = [name.strip() for name in methods.split(",")]
    choices = list(dict.fromkeys(fields["method"] for _, fields in SHOWN))
    for name in names:
        if name not in choices:
            raise QuantizerConfigError(
                f"--methods {methods!r} cannot be used: {name!r} is not a method. "
                f"Name one or more, separated by commas. Choices: {', '.join(choices)}."
            )
    return tuple(row for row in SHOWN if row[1]["method"] in names)


def run_demo(models: Path, shown: Shown, out: Console, err: Console, as_json: bool) -> None:
    """Measure every row of ``shown`` against the uncompressed cache and print the table."""
    started = time.perf_counter()
    with err.status(f"preparing {SOURCES['smollm2'].title} in {models}"):
        model, tokenizer = load(str(ensure_model("smollm2", models)))
    remember_tokenizer(model, tokenizer)
    text, half = passage(), None
    story, question = list(tokenizer.encode(text)), prompt_ids(tokenizer, f"{text}\n\n{QUESTION}")
    if mx.default_device().type == mx.DeviceType.cpu:
        half = mx.float16  # the model computes in float32 there; keys and values are held in 16 bits as on a GPU
    err.print(f"{SOURCES['smollm2'].title} reads a story of {len(story)} tokens, then answers: [bold]{QUESTION}[/]")
    bench = _Bench(model, tokenizer, story, question, half)
    rows = []
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=err) as progress:
        total = len(story) + len(question) + ANSWER
        labels = ["uncompressed", *(label for label, _ in shown)]
        room = max(err.height - 2, 1)  # bars that a terminal shows; of more, those that run or ended last
        tasks = [progress.add_task(label, total=total, start=False, visible=i < room) for i, label in enumerate(labels)]
        bench.show(progress, tasks[0])
        rows.append(bench.uncompressed())
        for i, (label, fields) in enumerate(shown, start=1):
            if i >= room:
                progress.update(tasks[i - room], visible=False)
                progress.update(tasks[i], visible=True)
            bench.show(progress, tasks[i])
            rows.append(bench.compressed(label, KVCacheConfig(**fields)))
    if as_json:
        told = [{"label": r.label, "right": r.right, "answer": r.answer} | dataclasses.asdict(r.measured) for r in rows]
        out.print_json(json.dumps(told))
        return
    wide = out.width >= WIDE
    out.print(table(rows, answers=wide))
    if not wide:
        for row in rows:
            out.print(Text(f"{row.label}: ", "bold") + answer_of(row))
        out.print()
    for line in footnotes(rows, half is not None):
        out.print(Text(line, "dim"))
    err.print(f"[dim]done in {time.perf_counter() - started:.0f} s[/]")
    if len(shown) < len(SHOWN):
        err.print("[dim]every method: veloxquant demo --all; some of them: --methods kivi,h2o[/]")


class _Bench:
    """Both measurements of a row: predictions over the end of the story, and the answer to the question."""

    def __init__(self, model: Any, tokenizer: Any, story: list[int], question: list[int], half: mx.Dtype | None):
        self.model, self.tokenizer, self.story, self.question, self.half = model, tokenizer, story, question, half
        self.prompt_len = len(story) - SCORED
        self.progress: Progress | None = None
        self.task = TaskID(0)
        self.truth: Reference | None = None

    def show(self, progress: Progress, task: TaskID) -> None:
        """Report to this bar from now on."""
        self.progress, self.task = progress, task
        progress.start_task(task)

    def tell(self, done: int) -> None:
        assert self.progress is not None
        self.progress.update(self.task, completed=done)

    def uncompressed(self) -> Row:
        """The reference; its bytes count 2 for every number held."""
        from mlx_lm.models.cache import make_prompt_cache

        self.truth = reference(
            self.model, self.story, self.prompt_len, step=CHUNK, progress=lambda done, _: self.tell(done)
        )
        same = compare(self.truth, self.truth.run)
        same = dataclasses.replace(same, kv_bytes=self.truth.bytes_16, ratio=1.0, relative_speed=1.0)
        return Row("uncompressed, 16 bits", "none", same, self.answer(make_prompt_cache(self.model)))

    def compressed(self, label: str, config: KVCacheConfig) -> Row:
        """One method against the reference."""
        measured = measure(
            self.model,
            self.story,
            lambda: KVCacheBuilder.for_model(self.model, config, serve_standalone=True),
            self.prompt_len,
            truth=self.truth,
            kv_dtype=self.half,
            step=CHUNK,
            progress=lambda done, _: self.tell(done),
        )
        caches = KVCacheBuilder.for_model(self.model, config, serve_standalone=True)
        if self.half is not None:
            store_as(caches, self.half)
        return Row(label, config.method, measured, self.answer(caches))

    def answer(self, caches: list[Any]) -> str:
        """What the model says, greedily, through mlx_lm's own loop."""
        from mlx_lm import stream_generate

        before, text = len(self.story), ""
        for response in stream_generate(
            self.model,
            self.tokenizer,
            self.question,
            max_tokens=ANSWER,
            prompt_cache=caches,
            prefill_step_size=CHUNK,
            prompt_progress_callback=lambda done, _: self.tell(before + done),
        ):
            text += response.text
            self.tell(before + len(self.question) + response.generation_tokens)
        assert self.progress is not None
        self.tell(int(self.progress.tasks[self.task].total or 0))
        self.progress.stop_task(self.task)
        return " ".join(text.split())


def answer_of(row: Row) -> Text:
    """What the model said, marked right or wrong."""
    return (Text("✓ ", "green") if row.right else Text("✗ ", "red")) + Text(row.answer or "(nothing)")


def table(rows: list[Row], answers: bool = True) -> Table:
    """The result for a terminal; without its last column, the answers, it fits into 80 columns."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 2 if answers else 1, 0, 0))
    view.add_column("method", no_wrap=True)
    for name in ("K/V held", "x smaller", "mean KL", "same top-1", "speed"):
        view.add_column(name, justify="right", no_wrap=True)
    if answers:
        view.add_column("answer", overflow="fold")
    for row in rows:
        m = row.measured
        view.add_row(
            row.label,
            size(m.kv_bytes),
            f"{m.ratio:.2f}x",
            f"{m.mean_kl:.4f}",
            f"{m.top1_agreement:.0%}",
            f"{m.relative_speed or 0:.2f}x",
            *([answer_of(row)] if answers else []),
        )
    return view


def footnotes(rows: list[Row], half: bool) -> list[str]:
    """What a reader needs to judge the figures."""
    m = rows[0].measured
    lines = [
        "K/V held: bytes of all arrays of the cache at the end of the story; x smaller: than 16-bit keys and values.",
        f"mean KL (nats) and same top-1: next-token predictions over the last {m.tokens} tokens of the story, against "
        "the uncompressed cache.",
        "speed: single-token steps at the end of the story, relative to the uncompressed cache in the same moment "
        f"({m.decode_tokens_per_second:.1f} tokens/s in its own pass).",
    ]
    if half:
        lines.append("This CPU computes in float32; keys and values are held in 16 bits, as a 16-bit model's would be.")
    lines += [f"{row.method}: {NOTES[row.method]}." for row in rows if row.method in NOTES]
    return lines
