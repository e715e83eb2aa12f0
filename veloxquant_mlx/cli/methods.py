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
        "standalone": info.standalone,
        "needs": info.needs,
    }


def as_table(entries: Iterable[Method]) -> Table:
    """The methods for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    table.add_column("family")
    table.add_column("paper", overflow="fold")
    table.add_column("needs")
    for entry in entries:
        table.add_row(Text(entry.info.name, "bold"), entry.info.family, source(entry), entry.info.needs)
    return table
