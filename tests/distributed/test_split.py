"""Models split over two processes on this machine, with mlx's own ring over loopback."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import Row
from tests.models.running import FIRST

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "distributed" / "split_model.py"


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def lines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both processes said, one line per rank and method.

    Where tests run in parallel, one worker starts the pair and the others read what it left: two rings on one machine
    would meet on the same ports.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out, failed = shared / f"ranks-{request.param}", ""
    with (shared / "split.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            out.mkdir()
            failed = launch(request.param, out)
    found = [json.loads(line) for file in sorted(out.iterdir()) for line in file.read_text().splitlines()]
    assert found and not failed, failed
    return found


def launch(split: str, out: Path) -> str:
    """Run the script in two processes; what they printed if they failed."""
    start = [str(Path(sys.executable).parent / "mlx.launch"), "-n", "2", "--python", sys.executable]
    done = subprocess.run(
        [*start, str(SCRIPT), "--split", split, "--tokens", "12", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.stdout + done.stderr if done.returncode else ""  # a failed process does not fail the launch


@pytest.mark.covers("tensor-parallel")
@pytest.mark.parametrize("row", FIRST.values(), ids=FIRST)
def test_same_tokens_as_one_process(lines: list[dict], row: Row) -> None:
    own = [line for line in lines if line["method"] == row.method]
    assert [line["same"] for line in own] == [True, True] and {line["rank"] for line in own} == {0, 1}


# What heads share every process holds: positions, a number of a fit; kvquant keeps at least one outlier per token.
SHARED = dict.fromkeys(("streaming_llm", "tova", "zipcache", "cam", "minicache", "xkv"), 0.02) | {"kvquant": 0.06}


def test_each_process_holds_its_share(lines: list[dict]) -> None:
    """Half of the heads, or half of the layers."""
    for line in lines:
        limit = line["whole"] * (0.5 + SHARED.get(line["method"], 0.0))
        assert line["whole"] / 2 <= line["bytes"] <= limit, line
