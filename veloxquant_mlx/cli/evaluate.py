"""``veloxquant eval``: tasks of lm-eval with compressed caches."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..cache.base import ModelConfig
from ..core.exceptions import ArtifactNotFoundError, CacheInputError
from ..methods._method import refuse
from ..quality.results import write
from .generate import location

BASELINE = "uncompressed"


def run_eval(
    name: str,
    label: str,
    config: ModelConfig | None,
    tasks: list[str],
    baseline: bool,
    out_file: Path | None,
    as_json: bool,
    out: Console,
    err: Console,
    **settings: Any,
) -> None:
    """Evaluate with ``config`` (and before that uncompressed, with ``baseline``); print a table, or JSON."""
    if out_file is not None and not out_file.parent.is_dir():
        raise CacheInputError(f"--out {str(out_file)!r} cannot be written: its folder does not exist. Make it.")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # lm-eval forks once tokenizers have run
    try:
        from ..quality.harness import evaluate
    except ModuleNotFoundError as error:
        raise ArtifactNotFoundError(
            f"veloxquant eval needs lm-eval ({error}). Run: pip install 'veloxquant-mlx[eval]'"
        ) from error
    where = location(name)
    runs: dict[str, ModelConfig | None] = {BASELINE: None} if baseline or config is None else {}
    if config is not None:
        runs[label] = config
    results: dict[str, dict[str, Any]] = {}
    for title, each in runs.items():
        err.print(f"[dim]evaluating: {title}[/]")
        try:
            results[title] = evaluate(where, each, tasks, **settings)
        except OSError as error:
            raise ArtifactNotFoundError(
                f"the model or the data of a task cannot be loaded ({type(error).__name__}: "
                f"{[*str(error).splitlines(), ''][0]}). Give the folder of a model; most tasks download their data."
            ) from error
    versions = {package: version(package) for package in ("lm_eval", "mlx", "mlx-lm")}
    versions["veloxquant-mlx"] = __version__
    told = {"model": name, "tasks": tasks, "settings": settings, "versions": versions, "results": results}
    text = json.dumps(told, indent=1, default=str) + "\n"
    if out_file is not None:
        write(out_file, text)
    if as_json:
        out.print_json(text)
    else:
        out.print(table(results))


def table(results: dict[str, dict[str, Any]]) -> Table:
    """A row for every metric of every task, a column for every cache."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    view.add_column("task")
    view.add_column("metric")
    for title in results:
        view.add_column(title, justify="right")
    first = next(iter(results.values()))
    for task, metrics in first.items():
        for key in metrics:
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr"):
                found = [(of[task].get(key), of[task].get(f"{metric}_stderr,{kind}")) for of in results.values()]
                shown = metric if kind == "none" else f"{metric} ({kind})"
                view.add_row(task, shown, *(_figure(*pair) for pair in found))
    return view


def _figure(value: Any, error: Any) -> str:
    """A value and its standard error, as far as they are numbers."""
    told = f"{value:.4f}" if isinstance(value, float) else str(value)
    return f"{told} ± {error:.4f}" if isinstance(error, float) else told


def names(text: str) -> list[str]:
    """Task names with commas between them."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        refuse("--tasks", text, "names with commas between them", "Such as arc_easy,hellaswag.")
    return found
