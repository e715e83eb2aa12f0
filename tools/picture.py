"""Draws the README's picture, docs/img/pareto.svg, from ``benchmarks/results/compare_*.json`` (extra ``plots``).

``python tools/picture.py [FILE …] [--out PICTURE]``: other results, another file (.svg or .png).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.method_numbers import comparisons, title  # noqa: E402
from veloxquant_mlx.quality.plots import pareto  # noqa: E402
from veloxquant_mlx.quality.results import Comparison  # noqa: E402

PICTURE = ROOT / "docs" / "img" / "pareto.svg"


def titled(found: Comparison) -> Comparison:
    """With the model's name as people write it."""
    return replace(found, model=replace(found.model, name=title(found)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args(arguments)
    found = [Comparison.load(file) for file in given.results] or comparisons()
    if not found:
        print("there are no results. Make them with: veloxquant compare --all --out FOLDER", file=sys.stderr)
        return 1
    pareto([titled(one) for one in found], given.out)
    print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
