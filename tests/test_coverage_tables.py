"""The tables in docs/ say what the tests say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import coverage_tables

ROOT = Path(__file__).resolve().parent.parent


def test_the_committed_tables_are_those_of_the_tests() -> None:
    """Collected again; that the tests pass is what the rest of the run says."""
    command = [sys.executable, str(ROOT / "tools" / "coverage_tables.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert coverage_tables.MISSING not in coverage_tables.TABLES.read_text()


def test_tests_that_disagree_are_found() -> None:
    cells = {("kivi", "trim"): {"yes", "no: drops tokens"}}
    with pytest.raises(pytest.UsageError, match="disagree on 'trim' of 'kivi'"):
        coverage_tables.table("method", cells, ["kivi"], ["trim"])
    assert "| kivi | not tested |" in coverage_tables.table("method", {}, ["kivi"], ["trim"])
