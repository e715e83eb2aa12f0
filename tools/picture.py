"""Draws the README's picture, docs/img/pareto.svg, from ``benchmarks/results/compare_*.json`` (extra ``plots``).

``python tools/picture.py [FILE …] [--out PICTURE]``: other results, another file (.svg or .png).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from veloxquant_mlx.quality.plots import pareto
from veloxquant_mlx.quality.results import Comparison

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "img" / "pareto.svg"
MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}


def titled(found: Comparison) -> Comparison:
    """With the model's name as people write it."""
    name = next((name for key, name in MODELS.items() if found.model.name.startswith(key)), found.model.name)
    return replace(found, model=replace(found.model, name=name))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args(arguments)
    files = given.results or sorted(RESULTS.glob("compare_*.json"), reverse=True)
    if not files:
        print("there are no results. Make them with: veloxquant compare --all --out FOLDER", file=sys.stderr)
        return 1
    pareto([titled(Comparison.load(file)) for file in files], given.out)
    print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
