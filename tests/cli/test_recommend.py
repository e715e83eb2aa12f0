"""``veloxquant recommend``: what it prints, at 80 columns too, its JSON, and what it refuses."""

from __future__ import annotations

import inspect
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.docs.blocks import DOCS, blocks
from tests.quality.test_recommend import RVQ1, RVQ2, folder, row, table
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.cli import app
from veloxquant_mlx.cli.recommend import code, command, parse_size, recommend
from veloxquant_mlx.core.exceptions import QuantizerConfigError
from veloxquant_mlx.quality.recommend import MAX_KL, MIN_NEEDLE, Choice

SNAP = row("snapkv, 512 tokens", "snapkv", 0.03, snap_budget=512)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the configuration of a tiny model, and results of another."""
    (tmp_path / "results.json").write_text(table(RVQ2, RVQ1, SNAP).to_json(), encoding="utf-8")
    (tmp_path / "m").mkdir()
    return folder(tmp_path / "m", "mistral")


def run(model: Path, *words: object):
    results = model.parent / "results.json"
    fixed = ["recommend", "--model", model, "--results", results]
    return CliRunner().invoke(app, [*map(str, [*fixed, *words])], env={"COLUMNS": "80"})


def test_a_recommendation(model):
    result = run(model, "--memory", "4MB", "--context", 8192)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "The uncompressed cache does not fit: 4.0 MiB." in said
    assert "recommended rvq, 2" in said and "mean KL 0.0200 nats" in said and "needles 100%" in said
    assert "small: KL 0.0200 at 1,024 tokens of the text 'built-in', CPU" in said
    assert "KVCacheConfig(method='turboquant_rvq', bit_width_inlier=2)" in said
    assert "rvq, 1" in said and "KL 0.500 above 0.1" in said
    assert "extrapolated: another model" in said and "extrapolated: a longer context: 8,192 tokens" in said
    pasted = [line for line in result.stdout.splitlines() if line.startswith("veloxquant generate")]
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if line not in pasted)
    assert pasted == [
        f"veloxquant generate --model {model} --method turboquant_rvq --option bit_width_inlier=2 --prompt -"
    ]


def test_what_is_printed_says_first_that_nothing_is_needed(model):
    lines = run(model, "--memory", "1GiB", "--context", 1000).stdout.splitlines()
    assert lines[0].startswith("m: weights") and lines[1].startswith("The uncompressed cache fits: ")


def test_a_poor_choice_is_not_recommended(model):
    result = run(model, "--memory", "4MB", "--context", 8192, "--max-kl", 0.001)
    said = " ".join(result.stdout.split())
    assert result.exit_code == 0 and "recommended" not in said
    assert "least bad rvq, 2" in said and "against KL 0.020 above 0.001" in said


def test_nothing_fits(model):
    result = run(model, "--memory", "900KB", "--context", 32768)
    said = " ".join(result.stdout.split())
    assert result.exit_code == 1 and "Nothing fits. rvq, 2 needs the least" in said and "It would fit at" in said
    result = run(model, "--memory", "1KB", "--context", 1000)
    assert result.exit_code == 1 and "the weights alone take more" in result.stdout


def test_json(model):
    told = json.loads(run(model, "--memory", "4MB", "--context", 8192, "--json").stdout)
    assert told["best"]["fields"] == {"bit_width_inlier": 2} and told["memory"] == 4_000_000
    assert told["context"] == 8192 and len(told["extrapolates"]) == 4
    result = run(model, "--memory", "1KB", "--context", 8192, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["best"] is None


def test_of_a_repository_the_configuration_alone_is_fetched(model, monkeypatch):
    asked: list[list[str]] = []

    def fetched(name: str, allow_patterns: list[str]) -> str:
        if name != "some/mistral":
            raise OSError("no network")
        asked.append(allow_patterns)
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    result = run(model, "--memory", "4MB", "--context", 8192, "--model", "some/mistral")
    assert result.exit_code == 0 and result.stdout.startswith("mistral: weights"), result.output
    assert len(asked) == 1 and not any("safetensors" in name and "json" not in name for name in asked[0])
    result = run(model, "--memory", "4MB", "--context", 8192, "--model", "some/other")
    assert result.exit_code == 2 and "'some/other' cannot be loaded (OSError: no network)" in result.stderr


def test_the_example_of_the_page_is_what_is_printed(tmp_path, monkeypatch):
    page = {block.title: block.text for block in blocks(DOCS / "recommend.md") if block.title}
    (tmp_path / "my-llama").mkdir()
    monkeypatch.chdir(tmp_path / "my-llama")
    Path("config.json").write_text(page["config.json"])
    words = ["recommend", "--model", ".", "--memory", "20GB", "--context", "65536"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert [line.rstrip() for line in result.stdout.splitlines()] == page["output.txt"].splitlines()


def test_the_limits_are_those_of_the_engine():
    limits = {p.name: p.default for p in inspect.signature(recommend).parameters.values()}
    assert (limits["max_kl"], limits["min_needle"]) == (MAX_KL, MIN_NEEDLE)


def choice(method: str, **fields: object) -> Choice:
    return Choice(method, method, fields, 1, 1, True, (0.0, 0.0), None, None, (), (), ())


def test_code_and_command_are_what_the_plan_is():
    pair = choice("snapkv+kivi", snap_budget=64, kivi_group_size=32)
    made = eval(code(pair), {"KVCacheConfig": KVCacheConfig})
    assert made == pair.plan.config()
    words = shlex.split(command(choice("kivi", bit_width_inlier=[4, 2]), "my model"))
    assert "my model" in words and "bit_width_inlier=[4, 2]" in words


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("8 gib", 8 * 2**30), ("1.5MiB", 3 * 2**19), ("512KB", 512_000), ("2TB", 2 * 10**12)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["8XB", "8", "GB", "-1GB", "0GB", "", "8GBs"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(QuantizerConfigError, match="--memory=.* cannot be used: .*such as 8GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--memory", "8XB", "--context", 10), "--memory='8XB'"),
        (("--memory", "8GB", "--context", 0), "--context"),
        (("--memory", "8GB", "--context", 10, "--max-kl", -1), "--max-kl"),
        (("--memory", "8GB", "--context", 10, "--results", "/nowhere.json"), "there are no results /nowhere.json"),
        (("--memory", "8GB", "--context", 10, "--model", "/nowhere"), "'/nowhere' is not a folder"),
        (("--memory", "8GB", "--context", 10, "--model", "tests"), "config.json is enough"),
    ],
)
def test_what_cannot_be_used_is_refused(model, words, told):
    result = run(model, *words)
    assert result.exit_code == 2 and told in " ".join(result.stderr.split()), result.output
