"""``veloxquant ruler``: how well a model uses long texts with compressed caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..cache.base import KVCacheBuilder
from ..cache.registry import method as method_of
from ..coordinators.reconstruction import remember_tokenizer
from ..core.exceptions import CacheInputError, QuantizerConfigError
from ..methods._method import refuse
from ..quality.plans import Plan, plans
from ..quality.results import write
from ..quality.ruler import UNCOMPRESSED, Cell, Factory, Method, Ruler, ruler
from .generate import load

SIDE_BY_SIDE = 3  # lengths that fit into 80 columns
NOTES = (
    "said: share of the right answer's parts in the greedy answer; chosen: share of questions whose right answer was "
    "likelier than every wrong one.",
    "nats: log-probability of the right answer, per token, against the uncompressed cache (whose own is shown first).",
)


def chosen(method: str | None, methods: str | None, bits: int | None, fields: Mapping[str, Any]) -> list[Plan]:
    """One method with the settings given, or the default rows of several; each setting goes to those that have it.

    Without names: a short choice. Raises ``QuantizerConfigError`` for names and settings that nobody takes.
    """
    if method is not None:
        if methods is not None:
            raise QuantizerConfigError("--method cannot be used with --methods. Leave one out.")
        own = dict(fields) | ({} if bits is None else {"bit_width_inlier": bits})
        found = [Plan(_label(method, own), method, own)]
    else:
        names = () if methods is None else methods.split(",")
        found = plans(names, bits=() if bits is None else (bits,))
        for name, value in fields.items():
            takers = [p for p in found if any(name in method_of(one).own_fields for one in p.method.split("+"))]
            if not takers:
                refuse(f"--option {name}", value, "an option of one of the methods", "Name a method that has it.")
            found = [_with(plan, name, value) if plan in takers else plan for plan in found]
    for plan in found:
        plan.config()  # what is wrong with a name shows before a model is loaded
    return found


def _with(plan: Plan, name: str, value: Any) -> Plan:
    return Plan(_label(plan.label, {name: value}), plan.method, {**plan.fields, name: value})


def _label(name: str, fields: Mapping[str, Any]) -> str:
    return ", ".join([name, *(f"{key}={value}" for key, value in fields.items())])


def numbers(option: str, text: str) -> list[int]:
    """``512,1024`` as a list."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        refuse(option, text, "whole numbers with commas between them", "Such as 512,1024.")


def run_ruler(
    name: str,
    rows: list[Plan],
    lengths: list[int],
    tasks: list[str],
    samples: int,
    seed: int,
    out_file: Path | None,
    as_json: bool,
    out: Console,
    err: Console,
) -> bool:
    """Ask all questions and print tables, or JSON; whether every method came through."""
    if out_file is not None and not out_file.parent.is_dir():
        raise CacheInputError(f"--out {str(out_file)!r} cannot be written: its folder does not exist. Make it.")
    model, tokenizer = load(name)
    remember_tokenizer(model, tokenizer)
    # On the CPU the model computes in float32; keys and values are held in 16 bits as on a GPU.
    half = mx.float16 if mx.default_device().type == mx.DeviceType.cpu else None
    about = {"model": name, "plans": {p.label: {"method": p.method, "fields": dict(p.fields)} for p in rows}}

    def save(found: Ruler) -> None:
        if out_file is not None:
            write(out_file, found.to_json(**about))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("answers"))
    with Progress(*columns, TimeElapsedColumn(), console=err) as progress:
        bar = progress.add_task("asking", total=None)
        found = ruler(
            model,
            tokenizer,
            {plan.label: _factory(model, plan) for plan in rows},
            lengths=lengths,
            tasks=tasks,
            samples=samples,
            seed=seed,
            kv_dtype=half,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
            so_far=save,  # a run that is interrupted leaves what it has
        )
    if as_json:
        out.print_json(found.to_json(**about))
    else:
        show(found, out)
    return all(method.error is None for method in found.methods)


def _factory(model: Any, plan: Plan) -> Factory:
    return lambda: KVCacheBuilder.for_model(model, plan.config(), serve_standalone=True)


def show(found: Ruler, out: Console) -> None:
    """A table of tasks and lengths for every method; more than three lengths go below each other."""
    for method in found.methods:
        smaller = "" if method.ratio is None or method.label == UNCOMPRESSED else f"  {method.ratio:.2f}x smaller"
        out.print(Text(method.label, "bold") + Text(smaller, "dim"))
        for start in range(0, len(found.lengths), SIDE_BY_SIDE):
            lengths = found.lengths[start : start + SIDE_BY_SIDE]
            if any(cell.length in lengths for cell in found.cells(method)):
                out.print(table(found, method, lengths))
        if method.error is not None:
            out.print(f"[bold red]error:[/] {escape(method.error)}\n", soft_wrap=True)
    for line in NOTES:
        out.print(Text(line, "dim"))


def table(found: Ruler, method: Method, lengths: Sequence[int]) -> Table:
    """One method: a row for each task and their mean, three figures for each length."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    view.add_column("tokens\ntask", no_wrap=True)
    for length in lengths:
        for head in (f"{length:,}\nsaid", "\nchosen", "\nnats"):
            view.add_column(head, justify="right", no_wrap=True)
    for task in found.tasks:
        view.add_row(task, *(text for length in lengths for text in _figures(method, method.cell(task, length))))
    if len(found.tasks) > 1:
        cells = [[c for c in found.cells(method) if c.length == length] for length in lengths]
        means = [_mean(row) if len(row) == len(found.tasks) else None for row in cells]
        view.add_section()
        view.add_row("mean", *(text for mean in means for text in _figures(method, mean)))
    return view


def _mean(cells: list[Cell]) -> Cell:
    """The mean of all tasks, every task with the same weight."""
    names = ("match", "chosen", "delta", "logprob")
    return replace(cells[0], **{name: fmean(getattr(cell, name) for cell in cells) for name in names})


def _figures(method: Method, cell: Cell | None) -> tuple[str, str, str]:
    if cell is None:
        return "-", "-", "-"
    nats = f"{cell.logprob:.2f}" if method.label == UNCOMPRESSED else f"{cell.delta:+.2f}"
    return f"{cell.match:.0%}", f"{cell.chosen:.0%}", nats
