"""Writes the table of methods, with what was measured, into README.md: python tools/readme.py. A test checks that."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.method_numbers import comparisons, in_short, title  # noqa: E402
from veloxquant_mlx.cache.registry import METHODS, Method, method  # noqa: E402
from veloxquant_mlx.cli.methods import source  # noqa: E402
from veloxquant_mlx.core.text import size  # noqa: E402
from veloxquant_mlx.quality.results import Comparison  # noqa: E402

README = ROOT / "README.md"
HEAD = """\
Under a model, by `veloxquant compare --all` at default settings but for the bits: bytes that the cache holds, bits per
number of the layers that methods compress (everything counted), mean KL from the uncompressed cache in nats, and
planted facts that are found. A small model ranks methods roughly, and what stays exact weighs less in a longer text:
measure your own.
"""
BLOCK = re.compile(r"(<!-- methods: .*? -->\n).*?(<!-- /methods -->)", re.DOTALL)


def as_markdown(entries: Iterable[Method]) -> str:
    """The table of the methods, one column for each model that was measured."""
    found = comparisons()
    heads = ["Method", "What it is", "Source", "Needs", *map(title, found)]
    lines = [HEAD, *map(about, found), "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for entry in entries:
        info = entry.info
        cells = [f"`{info.name}`", f"{info.title} ({info.family})", source(entry), info.needs]
        lines.append(f"| {' | '.join([*cells, *(in_short(one, info.name) for one in found)])} |")
    return "\n".join(lines)


def about(found: Comparison) -> str:
    """What the figures of a model are measured against."""
    whole = next((row.bytes_16 for row in found.rows if row.bytes_16), 0)
    plain = found.uncompressed and found.uncompressed.needle
    facts = f", {plain.mean:.0%} of the facts found" if plain else ""
    return (
        f"- {title(found)}: {found.scored} predictions after {found.ctx:,} tokens. Uncompressed: {size(whole)} in 16 "
        f"bits{facts}.\n  Methods compress {found.model.layers} of its layers, heads of {found.model.head_dim} numbers."
    )


def filled(text: str) -> str:
    """``text`` with the table between its two marks."""
    return BLOCK.sub(lambda marks: f"{marks[1]}{as_markdown(map(method, METHODS))}\n{marks[2]}", text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
