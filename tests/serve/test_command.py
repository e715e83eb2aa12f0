"""``veloxquant serve`` as a person runs it: it says where it listens, it stops; what keeps it from starting."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI
from typer.testing import CliRunner

from tests.serve.served import KIVI, Alone, make_folder, text
from veloxquant_mlx.cli import app

COMMAND = [sys.executable, "-c", "from veloxquant_mlx.cli import app; app()", "serve"]
RUNNER = CliRunner()


def test_help_explains_every_option() -> None:
    result = RUNNER.invoke(app, ["serve", "--help"])
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    rows = re.findall(r"│ \*? *(--[a-z-]+)(.*)│", plain)
    assert len(rows) > 20 and all(re.search(r"[A-Z][a-z]+", words) for _, words in rows), rows
    assert "Listens on 127.0.0.1" in plain and "no authentication" in plain


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_on_loopback_until_it_is_stopped(folder: Path, stop: signal.Signals) -> None:
    options = ["--method", "kivi", "--bits", "4", "--option", "kivi_group_size=32", "--option", "residual_length=32"]
    words = [*COMMAND, "--model", str(folder), *options, "--port", "0", "--max-tokens", "5"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = next((m for line in process.stderr if (m := re.search(r"(http://\S+) serves", line))), None)
        assert found is not None and found[1].startswith("http://127.0.0.1:")
        openai = OpenAI(base_url=found[1] + "/v1", api_key="none", max_retries=0)
        answer = openai.completions.create(model="default_model", prompt=text(50, 1))
        assert answer.choices[0].text == Alone(folder, KIVI).complete(text(50, 1), 5)
        process.send_signal(stop)
        rest = process.stderr.read()
        assert process.wait(20) == 0, rest
        assert "Traceback" not in rest


def bad(folder: Path, other: Path) -> list[tuple[list[str], str]]:
    busy = socket.create_server(("127.0.0.1", 0))
    KEEP.append(busy)
    model = ["--model", str(folder), "--port", "0"]
    return [
        (["--model", str(folder), "--method", "kivvi"], "unknown method 'kivvi'"),
        (["--model", str(folder), "--option", "nothing=1"], "name=value"),
        (["--model", "./no/such/folder"], "is not a folder"),
        (["--model", str(other)], "cannot be loaded"),
        ([*model, "--option", "kivi_group_size=7"], "kivi_group_size"),
        ([*model, "--option", "capacity=0"], "capacity"),
        ([*model, "--method", "snapkv", "--draft-model", str(folder)], "draft model"),
        ([*model, "--draft-model", "/no/such"], "is not a folder"),
        ([*model, "--chat-template-args", "[]"], "JSON object"),
        (["--model", str(folder), "--port", str(busy.getsockname()[1])], "cannot be opened"),
        ([*model, "--host", "256.0.0.1"], "cannot be opened"),
    ]


KEEP: list[socket.socket] = []


@pytest.mark.parametrize("case", range(11))
def test_what_keeps_it_from_starting_is_one_line_and_code_2(folder: Path, tmp_path: Path, case: int) -> None:
    words, message = bad(folder, tmp_path)[case]
    result = RUNNER.invoke(app, ["serve", "--log-level", "error", *words])
    KEEP.pop().close()
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]


@pytest.mark.parametrize("words", [["--port", "70000"], ["--port", "x"], ["--temp", "-1"], ["--log-level", "loud"], []])
def test_usage_errors(folder: Path, words: list[str]) -> None:
    result = RUNNER.invoke(app, ["serve", *(["--model", str(folder), *words] if words else [])])
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_model_without_anything_to_compress_says_so(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mamba", "mamba2")
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    with subprocess.Popen(
        [*COMMAND, "--model", str(folder), "--port", "0"], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if " serves " in line:
                break
        process.terminate()
        assert any("WARNING" in line for line in said), said
