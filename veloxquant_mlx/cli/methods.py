"""The registry as people read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ..cache.registry import Method


def source(entry: Method) -> str:
    """Where the method comes from, in a few words."""
    info = entry.info
    if info.arxiv:
        return f"arXiv:{info.arxiv}" + (f", {info.venue}" if info.venue else "")
    return info.venue or (info.paper or "no paper")


def as_dict(entry: Method) -> dict[str, Any]:
    """One method for JSON."""
    info = entry.info
    return {
        "name": info.name,
        "title": info.title,
        "family": info.family,
        "paper": info.paper,
        "arxiv": info.arxiv,
        "venue": info.venue,
        "status": "built" if entry.built else "planned",
        "standalone": info.standalone,
        "needs": info.needs,
    }


def as_table(entries: Iterable[Method]) -> Table:
    """The methods for a terminal, built ones first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    table.add_column("family")
    table.add_column("paper", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("needs")
    for entry in sorted(entries, key=lambda entry: not entry.built):
        status = Text("built", "bold green") if entry.built else Text("planned", "dim")
        name = Text(entry.info.name, "bold" if entry.built else "dim")
        table.add_row(name, entry.info.family, source(entry), status, entry.info.needs)
    return table
