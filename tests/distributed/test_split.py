"""Models split over two processes on this machine, with mlx's own ring over loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import Row
from tests.models.running import FIRST

# One process starts the pair of processes, however many run the tests.
pytestmark = pytest.mark.xdist_group("split")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "distributed" / "split_model.py"


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def lines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both processes said, one line per rank and method."""
    out = tmp_path_factory.mktemp("ranks")
    launch = [str(Path(sys.executable).parent / "mlx.launch"), "-n", "2", "--python", sys.executable]
    done = subprocess.run(
        [*launch, str(SCRIPT), "--split", request.param, "--tokens", "12", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = [json.loads(line) for file in sorted(out.iterdir()) for line in file.read_text().splitlines()]
    assert done.returncode == 0 and found, done.stdout + done.stderr  # a failed process does not fail the launch
    return found


@pytest.mark.covers("tensor-parallel")
@pytest.mark.parametrize("row", FIRST.values(), ids=FIRST)
def test_same_tokens_as_one_process(lines: list[dict], row: Row) -> None:
    own = [line for line in lines if line["method"] == row.method]
    assert [line["same"] for line in own] == [True, True] and {line["rank"] for line in own} == {0, 1}


def test_each_process_holds_its_share(lines: list[dict]) -> None:
    """Half of the heads, or half of the layers; positions that all heads share are held by every process."""
    for line in lines:
        shared = 0.02 if line["method"] in ("streaming_llm", "tova", "zipcache", "cam") else 0.0
        assert line["whole"] / 2 <= line["bytes"] <= line["whole"] * (0.5 + shared)
