"""``veloxquant ruler`` in process: which methods it takes, what it prints and writes."""

from __future__ import annotations

import io
import json

import mlx.core as mx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.models import tiny
from tests.quality.letters import letters
from veloxquant_mlx.cli import app, ruler
from veloxquant_mlx.quality.ruler import UNCOMPRESSED, Method, Ruler, Score

TASKS = ("single", "qa")


@pytest.fixture
def loaded(monkeypatch):
    """A tiny model in place of every folder."""
    model = tiny.build("llama", max_position_embeddings=1024)
    monkeypatch.setattr(ruler, "load", lambda _: (model, letters()))


def run(*arguments: str):
    return CliRunner().invoke(app, ["ruler", "--model", "x", *arguments], env={"COLUMNS": "80"})


def test_one_method_gets_the_settings_given() -> None:
    (plan,) = ruler.chosen("snapkv+kivi", None, 2, {"snap_budget": 64})
    assert plan.label == "snapkv+kivi, snap_budget=64, bit_width_inlier=2"
    snapkv, kivi = plan.config()  # type: ignore[reportGeneralTypeIssues]
    assert (snapkv.snap_budget, kivi.bit_width_inlier) == (64, 2)


def test_of_several_methods_each_option_goes_to_those_that_have_it() -> None:
    rows = ruler.chosen(None, "kivi,snapkv", None, {"snap_budget": 64, "residual_length": 32})
    assert [row.method for row in rows] == ["kivi", "kivi", "snapkv"]
    assert [row.fields.get("residual_length") for row in rows] == [32, 32, None]
    assert [row.fields.get("snap_budget") for row in rows] == [None, None, 64]
    assert rows[2].label == "snapkv, 512 tokens, snap_budget=64"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--method", "kivi", "--methods", "kivi"], "Leave one out"),
        (["--method", "kiwi"], "kiwi"),
        (["--methods", "kivi,kiwi"], "kiwi"),
        (["--methods", "kivi", "--option", "snap_budget=64"], "--option snap_budget"),
        (["--method", "kivi", "--option", "snap_budgets=64"], "snap_budgets"),
        (["--method", "kivi", "--option", "seed"], "name=value"),
        (["--method", "kivi", "--lengths", "5,x"], "--lengths"),
        (["--method", "kivi", "--out", "/nowhere/x.json"], "its folder does not exist"),
    ],
)
def test_what_is_wrong_shows_before_a_model_is_loaded(monkeypatch, arguments: list[str], told: str) -> None:
    monkeypatch.setattr(ruler, "load", lambda _: pytest.fail("loaded"))
    result = run(*arguments)
    assert result.exit_code == 2 and told in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--lengths", "4096"], "1..1024"), (["--tasks", "single,many"], "'many'"), (["--lengths", "60"], "length=60")],
)
def test_questions_that_cannot_be_asked_are_refused(loaded, arguments: list[str], told: str) -> None:
    result = run("--method", "kivi", *arguments)
    assert result.exit_code == 2 and told in result.stderr


def test_tables_and_file_of_a_run(loaded, tmp_path) -> None:
    path = tmp_path / "found.json"
    result = run(
        *("--method", "kivi", "--bits", "2", "--option", "residual_length=0", "--lengths", "700,900"),
        *("--tasks", "single,qa", "--samples", "1", "--out", str(path)),
    )
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout and max(map(len, result.stdout.splitlines())) <= 80
    for text in ("uncompressed", "kivi, residual_length=0, bit_width_inlier=2", "x smaller", "700", "900", "mean"):
        assert text in result.stdout
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told["methods"][0]["label"] == UNCOMPRESSED
    assert {(c["task"], c["length"]) for c in told["methods"][1]["cells"]} == {
        (t, n) for t in TASKS for n in (700, 900)
    }
    (plan,) = told["plans"].values()
    assert plan == {"method": "kivi", "fields": {"residual_length": 0, "bit_width_inlier": 2}}


def test_keys_and_values_of_a_cpu_arrive_in_16_bits(loaded, monkeypatch) -> None:
    seen = {}
    monkeypatch.setattr(ruler, "ruler", lambda *_, **fields: seen.update(fields) or pytest.skip())
    with pytest.raises(pytest.skip.Exception):
        ruler.run_ruler("x", [], [700], ["qa"], 1, 0, None, False, Console(), Console(file=io.StringIO()))
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert seen["kv_dtype"] == (mx.float16 if on_cpu else None)


def test_a_method_that_fails_is_told_and_ends_with_1(loaded) -> None:
    result = run("--method", "kivi", "--bits", "99", "--lengths", "700", "--tasks", "qa", "--samples", "1")
    assert result.exit_code == 1
    assert "error: QuantizerConfigError: bit_width_inlier=99" in result.stdout


def scores(length: int, delta: float, match: float, margin: float) -> list[Score]:
    return [Score(task, length, 0, (0.5,), 90, -1.5, delta, margin, match, "a", "b") for task in TASKS]


def test_four_lengths_fit_into_80_columns() -> None:
    lengths = (512, 1024, 65536, 131072)
    some = [score for length in lengths for score in scores(length, -12.345, 1.0, 0.5)]
    methods = (Method(UNCOMPRESSED, tuple(some), 1.0), Method("kivi, 2 bits", tuple(some[:3]), 4.14, "No: memory"))
    shown = io.StringIO()
    ruler.show(Ruler(TASKS, lengths, 1, 0, methods), Console(width=80, file=shown))
    text = shown.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    for part in ("131,072", "-1.50", "-12.35", "100%", "4.14x smaller", "error: No: memory"):
        assert part in text
    kivi = text[text.index("kivi") :]
    assert " - " in kivi and "131,072" not in kivi  # it failed before
