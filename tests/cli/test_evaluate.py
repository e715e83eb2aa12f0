"""``veloxquant eval`` in process, with our module over lm-eval replaced: what it passes on, prints and writes."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from veloxquant_mlx.cli import app, evaluate

FOUND = {
    "arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.0433, "acc_norm,none": 0.5},
    "gsm": {"alias": "gsm", "exact_match,strict": 0.0, "exact_match_stderr,strict": "N/A", "exact_match,loose": 1.0},
}


@pytest.fixture
def calls(monkeypatch):
    """What lm-eval would have been asked."""
    seen = []

    def run(path, config, tasks, **settings):
        seen.append((path, config, tasks, settings))
        return FOUND

    monkeypatch.setitem(sys.modules, "veloxquant_mlx.quality.harness", SimpleNamespace(evaluate=run))
    monkeypatch.setattr(evaluate, "version", lambda name: "0.4" if name == "lm_eval" else version(name))
    return seen


def run(*arguments: str):
    return CliRunner().invoke(app, ["eval", "--model", "x", *arguments], env={"COLUMNS": "80"})


def test_settings_reach_the_evaluator(calls) -> None:
    result = run(
        *("--tasks", "arc, gsm", "--method", "snapkv+kivi", "--bits", "2", "--option", "snap_budget=64"),
        *("--limit", "5", "--num-shots", "2", "--batch-size", "3", "--max-tokens", "7", "--no-chat", "--piece", "32"),
        *("--include-path", "here", "--seed", "9"),
    )
    assert result.exit_code == 0, result.output
    ((path, (snapkv, kivi), tasks, settings),) = calls
    assert (path, tasks) == ("x", ["arc", "gsm"])
    assert (snapkv.method, snapkv.snap_budget, kivi.method, kivi.bit_width_inlier) == ("snapkv", 64, "kivi", 2)
    assert settings == {
        "limit": 5, "num_fewshot": 2, "batch_size": 3, "max_tokens": 7, "use_chat_template": False, "piece": 32,
        "include_path": "here", "seed": 9,
    }  # fmt: skip
    assert "snapkv+kivi, bits=2, snap_budget=64" in re.sub(r"\s+", " ", result.stdout + result.stderr)


def test_with_baseline_the_uncompressed_cache_comes_first(calls, tmp_path) -> None:
    path = tmp_path / "found.json"
    result = run("--tasks", "arc,gsm", "--baseline", "--out", str(path))
    assert result.exit_code == 0, result.output
    assert [config and config.method for _, config, *_ in calls] == [None, "kivi"]
    line = next(line for line in result.stdout.splitlines() if " acc " in line)
    assert line.split() == ["arc", "acc", "0.2500", "±", "0.0433", "0.2500", "±", "0.0433"]
    assert "exact_match (strict)" in result.stdout and "stderr" not in result.stdout
    assert "exact_match (loose)" in result.stdout and "alias" not in result.stdout
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told["results"] == {"uncompressed": FOUND, "kivi": FOUND} and told["versions"]["lm_eval"] == "0.4"


def test_without_a_method_the_model_keeps_its_caches(calls) -> None:
    result = run("--tasks", "arc", "--method", "none", "--baseline", "--json")
    assert json.loads(result.stdout)["results"] == {"uncompressed": FOUND}
    assert [config for _, config, *_ in calls] == [None]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tasks", "arc,"], "--tasks"),
        (["--tasks", "arc", "--method", "kiwi"], "kiwi"),
        (["--tasks", "arc", "--out", "/nowhere/x.json"], "its folder does not exist"),
        (["--tasks", "arc", "--model", "./nowhere"], "is not a folder"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(calls, arguments: list[str], told: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and told in result.stderr and not calls


def test_without_lm_eval_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in ("veloxquant_mlx.quality.harness", "mlx_lm.evaluate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    result = run("--tasks", "arc")
    assert result.exit_code == 2 and "pip install 'veloxquant-mlx[eval]'" in result.stderr
