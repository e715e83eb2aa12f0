"""``veloxquant compare`` and ``veloxquant check`` on a tiny model: tables, files, runs that go on, exit codes."""

import io
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.models import tiny
from veloxquant_mlx.cli import app, check, compare
from veloxquant_mlx.quality import Comparison, Needles, Row
from veloxquant_mlx.quality.plans import SHOWN
from veloxquant_mlx.quality.results import Model, Text, Uncompressed, front

RUNNER = CliRunner()
TEXT = "".join(chr(32 + t % 90) for t in tiny.tokens(620)[0].tolist())  # type: ignore[union-attr]
NEEDLES = Needles((1024,), (0.5,), ("number", "word"), (((1.0, 0.5),),))
ROW = Row(
    "kivi, 4 bits",
    "kivi",
    "group quantization",
    {"bit_width_inlier": 4},
    bytes={"packed": 2**20, "window": 2**19, "index": 0, "fixed": 128},
    bytes_16=2**23,
    bits=4.31,
    ratio=3.71,
    mean_kl=0.0123,
    p99_kl=0.1,
    top1_flips=0.05,
    perplexity_ratio=1.02,
    needle=NEEDLES,
    copy=0.96,
    decode_speed=0.81,
    prefill_peak=1.5,
    layer_error=(0.1,),
    seconds=12.3,
    notes=("a note",),
)
FOUND = Comparison(
    Model("tiny", "f", 1, 1, 16, 100),
    Text("built-in", "s", 1500),
    1024,
    64,
    0,
    {},
    "CPU",
    Uncompressed(12.5, NEEDLES, 0.9, 10.0, 2**20),
    (ROW,),
)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder with a text; the model is tiny and its tokens are characters."""
    model = tiny.build("llama")
    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) for c in text], bos_token_id=None, chat_template=None)
    for module in (compare, check):
        monkeypatch.setattr(module, "load", lambda name: (model, tokenizer))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def run(folder, *words, command="compare"):
    fixed = [command, "--model", "some/tiny", "--text", folder / "text.txt", "--ctx", 500, "--scored", 4]
    return RUNNER.invoke(app, [*map(str, [*fixed, *words])], env={"COLUMNS": "80"})


def printed(view, width):
    out = io.StringIO()
    Console(width=width, file=out).print(view)
    return out.getvalue()


def test_a_table_and_files(folder):
    result = run(folder, "--methods", "kivi,snapkv+kivi", "--bits", "3", "--out", folder / "out")
    assert result.exit_code == 0, result.output
    labels = ["kivi, 4 bits", "kivi, 2 bits", "kivi, 3 bits", "snapkv+kivi, 3 bits"]
    assert all(label in result.stdout for label in labels)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert [line.split("  ")[0] for line in result.stderr.splitlines() if "smaller" in line][:2] == labels[:2]
    found = Comparison.load(folder / "out" / "results.json")
    assert {row.label for row in found.rows} >= set(labels) and len(found.rows) == 5
    assert (found.model.name, found.text.name, found.ctx, found.scored) == ("tiny", "text.txt", 500, 4)
    assert len((folder / "out" / "results.csv").read_text().splitlines()) == 6
    assert not list((folder / "out").glob(".*"))


def test_json_is_what_the_file_holds(folder):
    result = run(folder, "--methods", "kivi", "--out", folder / "out", "--json")
    assert result.stdout == (folder / "out" / "results.json").read_text()


def test_a_run_that_is_stopped_goes_on(folder, monkeypatch):
    arguments = ("--methods", "kivi,snapkv", "--out", folder / "out")
    saved = compare.save

    def once(found, where):
        saved(found, where)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "save", once)
    result = run(folder, *arguments)
    assert result.exit_code == 130 and "the same command goes on" in " ".join(result.stderr.split())
    monkeypatch.setattr(compare, "save", saved)
    (first,) = Comparison.load(folder / "out" / "results.json").rows
    result = run(folder, *arguments)
    assert result.exit_code == 0 and "1 of 3 rows are in" in result.stderr
    found = Comparison.load(folder / "out" / "results.json")
    assert found.rows[0] == first and [row.method for row in found.rows] == ["kivi", "kivi", "snapkv"]
    assert "snapkv, 512 tokens" in result.stdout and "kivi, 4 bits" in result.stdout


def test_results_of_another_measurement_are_not_written_over(folder):
    run(folder, "--methods", "snapkv", "--out", folder / "out")
    before = (folder / "out" / "results.json").read_text()
    result = run(folder, "--methods", "snapkv", "--seed", 1, "--out", folder / "out")
    assert result.exit_code == 2 and "seed 0, now 1" in result.stderr
    (folder / "out" / "results.json").write_text("{")
    assert run(folder, "--methods", "snapkv", "--out", folder / "out").exit_code == 2
    assert before and (folder / "out" / "results.json").read_text() == "{"


def test_a_method_that_fails_is_told_and_the_run_goes_on(folder):
    # Its combination with itself is refused when caches are made, long after the names were found good.
    result = run(folder, "--methods", "kivi,kivi+kivi")
    assert result.exit_code == 0
    assert "failed: QuantizerConfigError" in result.stderr and "cannot be combined" in result.stdout.replace("\n", " ")
    assert run(folder, "--methods", "kivi+kivi").exit_code == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--methods", "kiwi"), "method='kiwi'"),
        (("--family", "fruit"), "family='fruit'"),
        (("--bits", "4,x"), "--bits='4,x'"),
        (("--methods", "snapkv", "--bits", "4"), "bits=4"),
        (("--all", "--methods", "kivi"), "--all"),
        (("--all", "--family", "eviction"), "--all"),
        (("--text", "nowhere.txt"), "--text 'nowhere.txt'"),
        (("--ctx", "0"), "--ctx"),
        (("--scored", "1"), "--scored"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_model_is_loaded(words, told):
    result = RUNNER.invoke(app, ["compare", "--model", "/nowhere", *words])
    assert result.exit_code == 2 and told in result.stderr and "/nowhere" not in result.stderr


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    result = RUNNER.invoke(app, ["compare", "--model", "/nowhere", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2 and "--out" in result.stderr


def test_a_text_that_is_too_short_is_refused(folder):
    result = run(folder, "--ctx", 1000)
    assert result.exit_code == 2 and "has 620 tokens" in result.stderr


def test_without_plots_the_report_is_left_out_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = io.StringIO()
    compare.report(FOUND, tmp_path, Console(file=told, width=200))
    assert "no report.html: plots need matplotlib" in told.getvalue() and "veloxquant-mlx[plots]" in told.getvalue()
    assert "wrote results.json, results.csv to" in told.getvalue() and not (tmp_path / "report.html").exists()


def test_the_report_of_a_run_has_its_rows_and_all_plots(folder, monkeypatch):
    from veloxquant_mlx.quality import probes

    monkeypatch.setattr(probes, "MOST", 1.0)  # ten needles of characters
    result = run(folder, "--methods", "kivi,snapkv+kivi,kivi+kivi", "--out", folder / "out")
    assert result.exit_code == 0 and "wrote results.json, results.csv, report.html to" in result.stderr
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    for row in Comparison.load(folder / "out" / "results.json").rows:
        assert f">{row.label}</th>" in page
    assert "failed: QuantizerConfigError" in page and "text.txt, 620 tokens" in page
    assert page.count('role="img"') == 3


def test_the_table_has_every_figure_and_is_whole_at_80_columns():
    worst = replace(ROW, ratio=14.05, bits=16.04, mean_kl=12.3456, perplexity_ratio=123.4, decode_speed=0.05)
    rows = [replace(worst, label=label) for label, _ in SHOWN]
    text = printed(compare.table(FOUND, rows, wide=False), 80)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert all(row.label in text for row in rows)
    line = next(line for line in text.splitlines() if line.startswith("kivi, 4 bits"))
    assert line.split()[-8:] == ["16.04", "14.05x", "12.3456", "5%", "123", "75%", "96%", "0.05x"]
    plain = next(line for line in text.splitlines() if line.startswith("uncompressed"))
    assert plain.split()[-8:] == ["16.00", "1.00x", "0", "0%", "1.00", "75%", "100%", "1.00x"]


def test_a_wide_terminal_has_more_figures():
    line = next(line for line in printed(compare.table(FOUND, [ROW], wide=True), 120).splitlines() if "kivi" in line)
    assert line.split()[-4:] == ["1.5", "MiB", "0.1000", "1.50x"]


def test_figures_that_were_not_measured_are_dashes():
    bare = Row("kivi", "kivi", "f", bits=4.0, ratio=4.0, mean_kl=0.0, perplexity_ratio=1.0)
    text = printed(compare.table(replace(FOUND, uncompressed=None), [bare], wide=True), 120)
    assert text.splitlines()[-1].count("-") >= 5 and "uncompressed" not in text


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.0, "0.0000"), (0.0123, "0.0123"), (4.2e-5, "4e-05")])
def test_a_small_kl_is_not_rounded_away(value, text):
    assert compare.kl(value) == text


def test_rows_that_no_other_beats_are_marked():
    def row(label, size, kl):
        return replace(ROW, label=label, bytes={"packed": size, "window": 0, "index": 0, "fixed": 0}, mean_kl=kl)

    rows = [row("a", 10, 0.1), row("b", 20, 0.05), row("c", 20, 0.2), row("d", 10, 0.1), replace(ROW, error="x")]
    assert [one.label for one in front(rows)] == ["a", "b", "d"]
    text = printed(compare.table(FOUND, rows[:3], wide=False), 80)
    lines = [line.split()[:2] for line in text.splitlines() if line[:2] in ("a ", "b ", "c ")]
    assert [mark == "*" for _, mark in lines] == [True, True, False]


def test_notes_are_printed_for_a_few_rows_only():
    assert "kivi, 4 bits: a note" in compare.explained(FOUND, [ROW], False)
    many = compare.explained(FOUND, [ROW] * 9, False)
    assert not any("a note" in line for line in many) and any("results.json" in line for line in many)


# --------------------------------------------------------------------------------------------------------- check


def gate(folder, config, *words):
    (folder / "kv.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return run(folder, "--config", folder / "kv.json", *words, command="check")


KIVI = {"method": "kivi", "bit_width_inlier": 4, "residual_length": 32}


def test_bounds_that_are_met(folder):
    result = gate(
        folder, KIVI, "--max-kl", 1, "--max-p99-kl", 1, "--max-flips", 1, "--max-perplexity", 2, "--min-ratio", 1
    )
    assert result.exit_code == 0, result.output
    first, *lines = result.stdout.splitlines()
    assert first.startswith("kivi (bit_width_inlier=4, residual_length=32): 500 tokens of prompt")
    assert [line.split()[0] for line in lines] == ["ok"] * 5
    assert max(map(len, lines)) <= 80


def test_every_bound_that_is_missed_is_a_line(folder):
    result = gate(folder, KIVI, "--max-kl", 0, "--min-ratio", 100, "--max-flips", 1)
    assert result.exit_code == 1
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == ["FAIL", "ok", "FAIL"]
    assert "mean KL" in result.stdout and "at most 0" in result.stdout and "at least 100" in result.stdout


def test_json_says_the_same(folder):
    told = json.loads(gate(folder, KIVI, "--max-kl", 0, "--json").stdout)
    assert told["passed"] is False and told["row"]["method"] == "kivi"
    (bound,) = told["bounds"]
    assert bound["name"] == "mean KL" and bound["limit"] == 0 < bound["found"] == told["row"]["mean_kl"]
    assert bound["met"] is False


def test_needles_are_only_asked_for_with_a_bound(folder, monkeypatch):
    from veloxquant_mlx.quality import probes

    monkeypatch.setattr(probes, "MOST", 1.0)  # ten needles of characters
    result = gate(folder, KIVI, "--min-needle", 1)
    # A random model finds nothing, compressed or not, and says so.
    assert result.exit_code == 1 and "(the uncompressed cache finds 0)" in result.stdout
    monkeypatch.setattr(probes, "build", lambda *_, **__: 1 / 0)
    assert gate(folder, KIVI, "--max-kl", 1).exit_code == 0


def test_needles_that_do_not_fit_are_no_failure_of_the_method(folder):
    result = gate(folder, KIVI, "--min-needle", 1)
    assert result.exit_code == 2 and "do not fit" in result.stderr


def test_a_method_that_fails_fails_the_check(folder, monkeypatch):
    from veloxquant_mlx.cache.layer import CompressedKVCache

    def broken(self, keys, values):
        raise RuntimeError("no room")

    monkeypatch.setattr(CompressedKVCache, "update_and_fetch", broken)
    result = gate(folder, KIVI, "--max-kl", 1)
    assert result.exit_code == 1 and "RuntimeError: no room" in result.stdout


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"method": "kiwi"}, "unknown method 'kiwi'"),
        ({"method": "kivi", "bits": 4}, "bits=4"),
        ({"method": "kivi", "bit_width_inlier": 99}, "bit_width_inlier=99"),
        ({"bits": 4}, "an object with a method"),
        ([KIVI, KIVI, KIVI], "a list of two"),
        ([KIVI, KIVI], "cannot be combined"),
        ([{"method": "snapkv", "seed": 1}, {"method": "kivi", "seed": 2}], "seed has two values"),
        ("{", "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_used_exits_with_2(folder, config, told):
    result = gate(folder, config, "--max-kl", 1)
    assert result.exit_code == 2 and told in result.stderr, result.output


def test_a_check_without_bounds_or_file_exits_with_2(folder):
    assert "needs a bound" in gate(folder, KIVI).stderr
    result = run(folder, "--config", folder / "nowhere.json", "--max-kl", 1, command="check")
    assert result.exit_code == 2 and "nowhere.json" in result.stderr


@pytest.mark.parametrize(
    ("told", "method", "fields"),
    [
        (KIVI, "kivi", {"bit_width_inlier": 4, "residual_length": 32}),
        ([{"method": "snapkv", "snap_budget": 64}, KIVI], "snapkv+kivi", {"snap_budget": 64, **KIVI}),
        ({"method": "snapkv+kivi", "snap_budget": 64}, "snapkv+kivi", {"snap_budget": 64}),
        ({"label": "a row", "method": "kivi", "fields": {"bit_width_inlier": 4}, "bits": 4.3}, "kivi", KIVI),
    ],
)
def test_a_configuration_is_read_in_any_of_its_forms(tmp_path, told, method, fields):
    (tmp_path / "f").write_text(json.dumps(told))
    plan = check.read_plan(tmp_path / "f")
    assert plan.method == method
    assert plan.fields.items() <= {**fields}.items() and ("method" not in plan.fields)
    if isinstance(told, dict) and "label" in told:
        assert plan.label == "a row"


def test_copying_that_means_nothing_is_no_success():
    found, remark = check.figures(replace(ROW, copy=None), Uncompressed(1.0, copy=0.0))[5]
    bound = check.Bound("copied", found, 0.0, least=True, remark=remark)
    assert not bound.met and "not measured" in str(bound.told()) and "copies nothing" in str(bound.told())


def test_a_bound_is_met_at_its_limit_and_never_without_a_figure():
    assert check.Bound("mean KL", 0.5, 0.5, least=False).met and check.Bound("x", 0.5, 0.5, least=True).met
    assert not check.Bound("mean KL", 0.51, 0.5, least=False).met and not check.Bound("x", 0.4, 0.5, least=True).met
    assert not check.Bound("x", None, 0.0, least=True).met
