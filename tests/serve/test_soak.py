"""A short run of benchmarks/serve_soak.py: the real command, eight clients at a time, some of whom leave."""

from pathlib import Path

import pytest

from benchmarks.serve_soak import faults, soak


@pytest.mark.parametrize(("phase", "count"), [("compressed", 40), ("reuse", 20)])
def test_short_soak(folder: Path, phase: str, count: int) -> None:
    row = soak(folder, phase, count)
    assert faults(row) == []
    assert row["answers compared"] > 0.7 * count and row["clients gone"] > 0
    assert (row["prompt tokens reused"] > 0) == (phase == "reuse")
