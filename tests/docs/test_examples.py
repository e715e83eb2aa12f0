"""Every script in examples/ runs on a tiny model, as a person would run it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.running import furnish

EXAMPLES = ROOT / "examples"
# Script and arguments, in this order; all of them run in the folder of a reader.
CALLS = (
    ("quickstart.py", ["my-model"], "kivi"),
    ("two_methods.py", ["my-model"], "snapkv \\+ kivi: "),
    ("prompt_cache.py", ["my-model", "book.txt", "book.safetensors"], "3000 tokens in book.safetensors"),
    ("prompt_cache.py", ["my-model", "book.safetensors"], "Who is in it"),
    ("bits_per_layer.py", ["my-model", "book.txt"], "on average: mean KL "),
    ("batch.py", ["my-model"], "Name three rivers"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("examples")
    furnish(made)
    return made


def test_every_example_is_run() -> None:
    assert {script for script, *_ in CALLS} == {path.name for path in EXAMPLES.glob("*.py")}


def test_examples_run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    for script, arguments, said in CALLS:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        out = capsys.readouterr().out
        assert re.search(said, out), f"{script} says {out}"
