"""The measured rows in benchmarks/results/, by method."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from veloxquant_mlx.core.text import kl, size
from veloxquant_mlx.quality.recommend import NOTHING
from veloxquant_mlx.quality.results import Comparison, Row

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
NOT_MEASURED = "not measured"


@cache
def results(kind: str, model: str) -> list[dict[str, Any]]:
    file = RESULTS / f"{kind}_{model}.json"
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []


@cache
def settings(kind: str, model: str) -> dict[str, Any]:
    file = RESULTS / f"{kind}_{model}.json"
    return json.loads(file.read_text(encoding="utf-8"))["settings"] if file.is_file() else {}


def methods_in(label: str) -> list[str]:
    """The methods of a measured row: its label begins with one, or joins two."""
    return [re.match(r"\w+", part)[0] for part in label.split(" + ")]  # type: ignore[index]


def quality(name: str, model: str) -> list[dict[str, Any]]:
    """Measured rows of the method, alone first."""
    rows = [row for row in results("quality", model) if name in methods_in(row["cache"])]
    return sorted(rows, key=lambda row: (" + " in row["cache"], row["bits held"]))


def dropped(name: str, model: str) -> list[dict[str, Any]]:
    """Measured rows of the method dropping tokens, with the queries that it asks for."""
    return [row for row in results("eviction", model) if row["method"] == name and row["queries"] != "keys instead"]


def comparisons() -> list[Comparison]:
    """What ``veloxquant compare`` found, if it was committed, in the order of ``MODELS``.

    ``benchmarks/results/compare_*.json`` are links to the tables that ship with the package.
    """
    found = {file.stem.removeprefix("compare_"): Comparison.load(file) for file in RESULTS.glob("compare_*.json")}
    return [found[key] for key in sorted(found, key=lambda key: ([*MODELS, key].index(key), key))]


def title(found: Comparison) -> str:
    """The model's name as people write it."""
    return next((name for key, name in MODELS.items() if found.model.name.startswith(key)), found.model.name)


def compared(name: str) -> Iterator[str]:
    """A table for each comparison that has rows of the method, alone or in a pair."""
    for found in comparisons():
        rows = [row for row in found.rows if name in row.method.split("+")]
        if not rows:
            continue
        yield f"### {title(found)}, every figure of `veloxquant compare`"
        yield ""
        yield f"{found.scored} predictions after {found.ctx:,} tokens. Machine: {found.machine}."
        yield "[What the figures are](../quality.md)."
        yield ""
        yield "| Setting | Bits held | x smaller | Mean KL | Flips | Needles | Copy | Decode speed |"
        yield "|---|---|---|---|---|---|---|---|"
        yield from map(compared_row, rows)
        yield ""


def compared_row(row: Row) -> str:
    """One line; what was not measured is a dash."""
    if row.error is not None:
        return f"| {row.label} | failed: {row.error} | | | | | | |".replace("\n", " ")
    needle = None if row.needle is None else row.needle.mean
    figures = (
        (row.bits, ".2f"),
        (row.ratio, ".2f"),
        (row.mean_kl, ".4f"),
        (row.top1_flips, ".0%"),
        (needle, ".0%"),
        (row.copy, ".2f"),
        (row.decode_speed, ".2f"),
    )
    return f"| {row.label} | {' | '.join('–' if value is None else format(value, form) for value, form in figures)} |"


def in_short(found: Comparison, name: str) -> str:
    """A table cell: bytes, bits, KL and facts found of the method's rows alone, or why there are none."""
    cells = []
    for row in (row for row in found.rows if row.method == name):
        if row.error is not None or row.bits is None or row.nbytes is None:
            cells.append("failed")
        elif row.bits >= NOTHING:
            cells.append(f"saves nothing at {found.ctx:,} tokens ({row.bits:.2f}&nbsp;bits)")
        else:
            facts = "" if row.needle is None else f", {row.needle.mean:.0%}"
            cells.append(f"{size(row.nbytes)} ({row.bits:.2f} bits): {kl(row.mean_kl)}{facts}".replace(" ", "&nbsp;"))
    return "<br>".join(cells) or NOT_MEASURED


def best(name: str, model: str) -> str:
    """Bits held and KL of the row alone that holds the fewest bits, and of the one with the smallest KL.

    Where there is none: of a prompt of which a quarter was kept.
    """
    rows = [r for r in quality(name, model) if " + " not in r["cache"] and " only" not in r["cache"]]
    if not rows:
        least = min(dropped(name, model), key=lambda r: r["budget"], default=None)
        if least is None:
            return NOT_MEASURED
        return f"{16 * least['bytes held / float32']:.2f}&nbsp;bits:&nbsp;{least['mean KL']:.3f}&nbsp;*"
    ends = dict.fromkeys((min(range(len(rows)), key=lambda i: rows[i][key])) for key in ("bits held", "mean KL"))
    return "<br>".join(f"{rows[i]['bits held']:.2f}&nbsp;bits:&nbsp;{rows[i]['mean KL']:.3f}" for i in ends)
