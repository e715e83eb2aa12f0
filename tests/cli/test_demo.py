"""The demo on a shortened story: the whole path on the real model, in seconds."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.conftest import MODELS
from veloxquant_mlx.cache.base import KVCacheConfig
from veloxquant_mlx.cache.registry import METHODS, method
from veloxquant_mlx.cli import app, demo
from veloxquant_mlx.core.exceptions import QuantizerConfigError


def test_the_passage_holds_the_fact_once_in_its_middle():
    text = demo.passage()
    assert text.count(demo.FACT) == 1
    assert 0.35 < text.index(demo.FACT) / len(text) < 0.65
    assert 1200 < len(text.split()) * 1.2 < 1600  # about 1.2 tokens a word


def test_every_built_method_is_shown_and_every_setting_is_valid():
    assert {fields["method"] for _, fields in demo.SHOWN} == set(METHODS)
    for _, fields in demo.SHOWN:
        config = KVCacheConfig(**fields, head_dim=64)
        method(config.method).check(config)


def test_without_names_the_demo_shows_the_short_choice_and_with_all_every_row():
    assert [label for label, _ in demo.chosen(None, every=False)] == list(demo.SHORT)
    assert demo.chosen(None, every=True) == demo.SHOWN


def test_named_methods_are_shown_with_all_their_settings():
    assert [fields["method"] for _, fields in demo.chosen("h2o, kivi,h2o", every=False)] == ["kivi", "kivi", "h2o"]


@pytest.mark.parametrize(("names", "wrong"), [("kivi,kiwi", "'kiwi'"), ("", "''"), ("kivi,", "''"), ("none", "'none'")])
def test_a_method_that_is_not_there_is_refused_with_the_choices(names, wrong):
    with pytest.raises(QuantizerConfigError, match=f"{wrong} is not a method.*Choices: kivi, kivi_sink, .*h2o"):
        demo.chosen(names, every=False)


def test_the_command_refuses_before_it_loads_a_model(tmp_path):
    for arguments, told in ((["--methods", "kiwi"], "Choices: kivi"), (["--methods", "kivi", "--all"], "--all")):
        result = CliRunner().invoke(app, ["demo", "--models", str(tmp_path), *arguments])
        assert result.exit_code == 2 and told in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_help_names_the_options_and_the_extra():
    told = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).stdout
    assert all(text in told for text in ("--all", "--methods", "'veloxquant-mlx[demo]'"))


def test_the_table_marks_right_and_wrong_answers():
    measured = demo.Measurement(96, 2**20, 4.0, 0.01, 0.1, 0.2, 0.9, 8.0, 0.75, 5.0, 0)
    rows = [demo.Row("good", "kivi", measured, "It is Marigold."), demo.Row("bad", "streaming_llm", measured, "")]
    shown = io.StringIO()
    Console(width=120, file=shown).print(demo.table(rows))
    lines = shown.getvalue().splitlines()
    good, bad = (next(line for line in lines if name in line) for name in ("good", "bad"))
    for figure in ("1.0 MiB", "4.00x", "0.0100", "90%", "0.75x", "✓ It is Marigold."):
        assert figure in good
    assert "✗ (nothing)" in bad
    assert any(line.startswith("streaming_llm: ") for line in demo.footnotes(rows, half=True))


def test_the_table_is_whole_at_80_columns():
    """A pipe and a small terminal have 80: no figure is cut, and the answers follow below."""
    measured = demo.Measurement(96, 32 * 2**20, 14.05, 0.01234, 0.1, 0.2, 1.0, 8.0, 10.75, 5.0, 0)
    rows = [demo.Row(label, fields["method"], measured, "x") for label, fields in demo.SHOWN]
    shown = io.StringIO()
    Console(width=80, file=shown).print(demo.table(rows, answers=False))
    text = shown.getvalue()
    assert "…" not in text and all(row.label in text for row in rows)
    assert all(figure in text for figure in ("32.0 MiB", "14.05x", "0.0123", "100%", "10.75x"))
    assert "✓" not in text and str(demo.answer_of(rows[0])) == "✗ x"


def test_of_more_rows_than_lines_the_running_one_is_in_sight(monkeypatch, tmp_path):
    """Rich cuts what does not fit into the terminal from below: the bar that moves must not be there."""
    seen, height = [], 10
    measured = demo.Measurement(96, 2**20, 4.0, 0.01, 0.1, 0.2, 0.9, 8.0, 0.75, 5.0, 0)

    class Bench:
        def __init__(self, *_):
            pass

        def show(self, progress, task):
            visible = [one.id for one in progress.tasks if one.visible]
            seen.append((task, task in visible, len(visible)))

        def uncompressed(self):
            return demo.Row("uncompressed", "none", measured, "")

        def compressed(self, label, config):
            return demo.Row(label, config.method, measured, "")

    monkeypatch.setattr(demo, "_Bench", Bench)
    monkeypatch.setattr(demo, "ensure_model", lambda *_: tmp_path)
    monkeypatch.setattr(demo, "load", lambda _: (None, SimpleNamespace(encode=str.split)))
    monkeypatch.setattr(demo, "prompt_ids", lambda *_: [1])
    monkeypatch.setattr(demo, "remember_tokenizer", lambda *_: None)
    told = io.StringIO()
    demo.run_demo(tmp_path, demo.SHOWN, Console(file=told), Console(file=io.StringIO(), width=80, height=height), False)
    assert [task for task, _, _ in seen] == list(range(len(demo.SHOWN) + 1))
    assert all(shown and count < height for _, shown, count in seen)
    assert all(label in told.getvalue() for label, _ in demo.SHOWN)


@pytest.mark.real_model
def test_the_demo_runs(monkeypatch):
    story = demo.passage()
    start = story.index("In the autumn")
    monkeypatch.setattr(demo, "passage", lambda: story[start : start + 900])
    monkeypatch.setattr(demo, "SCORED", 8)
    result = CliRunner().invoke(
        app, ["demo", "--models", str(MODELS), "--methods", "turboquant_mse,streaming_llm", "--json"]
    )
    assert result.exit_code == 0, result.output
    plain, packed, streaming = json.loads(result.stdout)
    assert plain["right"] and packed["right"]
    assert plain["ratio"] == 1.0 and plain["mean_kl"] == 0.0
    # Fewer tokens than either window: streaming_llm holds all 16-bit rows and differs by their rounding only.
    assert streaming["mean_kl"] < 1e-4
    assert 1.0 < packed["ratio"] < 4.0
    assert packed["mean_kl"] < 0.1
