"""Writes the table of built methods into README.md. Run from the repository's root; a test checks that it was."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from veloxquant_mlx.cache.registry import METHODS, Method, method
from veloxquant_mlx.cli.methods import source

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- methods: .*? -->\n).*?(<!-- /methods -->)", re.DOTALL)


def as_markdown(entries: Iterable[Method]) -> str:
    """The table of the methods that are built."""
    lines = ["| Method | What it is | Source | Needs |", "|---|---|---|---|"]
    for entry in entries:
        if entry.built:
            info = entry.info
            lines.append(f"| `{info.name}` | {info.title} ({info.family}) | {source(entry)} | {info.needs} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """``text`` with the table between its two marks."""
    return BLOCK.sub(lambda marks: f"{marks[1]}{as_markdown(map(method, METHODS))}\n{marks[2]}", text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
