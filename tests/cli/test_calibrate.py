"""``veloxquant calibrate`` on a tiny model: lists that fit, artifacts that load, and readable refusals."""

import ast
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.artifacts import CalibrationArtifact
from veloxquant_mlx.cli import app, calibrate

RUNNER = CliRunner()
TOKENS: Any = tiny.tokens(400)[0].tolist()
TEXT = "".join(chr(32 + t % 90) for t in TOKENS)


def run(*words):
    return RUNNER.invoke(app, ["calibrate", "--model", "m", *map(str, words)])


@pytest.fixture
def model(monkeypatch, tmp_path):
    """gemma3_text: four layers, two of them sliding. Its tokens are the characters of the text."""
    made = tiny.build("gemma3_text")
    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) % tiny.VOCAB for c in text], bos_token_id=None)
    monkeypatch.setattr(calibrate, "load", lambda name: (made, tokenizer))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return SimpleNamespace(model=made, text=tmp_path / "text.txt", out=tmp_path / "out.safetensors")


def bits(model, *words):
    return run("--text", model.text, "--option", "residual_length=32", "--tokens", 120, *words)


def test_a_list_for_an_average(model):
    result = bits(model, "--allocate-bits", 3, "--choices", "2,3,4", "--check")
    assert result.exit_code == 0, result.output
    first, _, *rest = result.stdout.splitlines()
    found = re.fullmatch(r"KVCacheConfig\(method='kivi', bit_width_inlier=(\[.*\]), residual_length=32\)", first)
    assert found
    list_ = ast.literal_eval(found[1])
    caches = KVCacheBuilder.for_model(model.model, KVCacheConfig(bit_width_inlier=list_, method="kivi"))
    assert sum(caches[i].config.bit_width_inlier for i in (1, 3)) == 6
    assert "3.00 bits on average over 2 compressed layers" in rest[0]
    assert "2 layers that keep the model's own cache" in rest[1]
    assert [line.split(":")[0] for line in rest[2:4]] == ["expected", "measured"]


def test_json(model):
    told = json.loads(bits(model, "--allocate-bits", 2.5, "--choices", "2,3", "--check", "--json").stdout)
    assert sorted(told["bits"][i] for i in told["compressed_layers"]) == [2, 3]
    assert told["compressed_layers"] == [1, 3]
    assert told["average"] == 2.5
    assert told["tokens"] == 120
    assert told["measured_on_other_text"] is True
    assert told["expected_gain"] == pytest.approx(told["expected_kl_uniform"] - told["expected_kl"])
    assert told["standard_error"] >= 0
    assert 0 < told["expected_kl"] <= told["expected_kl_uniform"]
    assert told["measured_kl"] > 0 < told["measured_kl_uniform"]


def test_a_short_text_is_checked_on_itself_and_says_so(model):
    model.text.write_text(TEXT[:150], encoding="utf-8")
    result = bits(model, "--allocate-bits", 2.5, "--choices", "2,3", "--check")
    assert "this is the same part" in result.stdout
    assert "uniform: no such bits exist here" in result.stdout


def test_filters_are_written_and_used(model):
    result = run("--text", model.text, "--method", "qfilters", "--out", model.out, "--tokens", 300)
    assert result.exit_code == 0, result.output
    artifact = CalibrationArtifact.load(model.out)
    artifact.check_model(model.model)
    assert (artifact.method, artifact.indices, artifact.about["tokens"]) == ("qfilters", [1, 3], 300)
    assert artifact.layer(1)["filters"].shape == (2, 32)
    assert result.stdout.startswith(f"wrote {model.out}: qfilters for 2 layers")
    assert f"store={model.out}" in result.stdout
    assert "query head" in result.stderr  # random weights: some heads have no direction
    config = KVCacheConfig(method="qfilters", qfilters_budget=64, qfilters_min_retention=None, store=artifact)
    caches = KVCacheBuilder.for_model(model.model, config)
    model.model(tiny.tokens(100), cache=caches)
    model.model(tiny.tokens(1), cache=caches)
    assert [caches[i].describe()["rows"] for i in (1, 3)] == [64, 64]
    assert "filters from the calibration artifact" in caches[1].describe()["notes"]


@pytest.mark.parametrize(("method", "name"), [("kvtc", "k_basis"), ("spectral", "model.v_basis")])
def test_axes_are_written_and_used(model, method, name):
    result = run("--text", model.text, "--method", method, "--out", model.out, "--tokens", 300)
    assert result.exit_code == 0, result.output
    artifact = CalibrationArtifact.load(model.out)
    assert artifact.layer(3)[name].shape == (2, 32, 32)
    assert result.stderr.count("note: layer") == 2
    caches = KVCacheBuilder.for_model(model.model, KVCacheConfig(method=method, store=artifact), serve_standalone=True)
    assert "axes from the calibration artifact" in caches[1].describe()["notes"]


def test_generate_and_serve_take_the_file_as_store(model):
    CalibrationArtifact("qfilters", {}).save(model.out)
    words = ("generate", "--model", "./no/such/folder", "--prompt", "p", "--option")
    assert "not a folder" in RUNNER.invoke(app, [*words, f"store={model.out}"]).stderr  # the file was read
    assert "no calibration file" in RUNNER.invoke(app, [*words, "store=nowhere"]).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs one of --allocate-bits.*--out"),
        (("--allocate-bits", 3, "--out", "f"), "exactly one"),
        (("--allocate-bits", 3, "--method", "snapkv"), "method='snapkv'.*reads bit_width_inlier"),
        (("--allocate-bits", 3, "--choices", "2,x"), "--choices='2,x'"),
        (("--allocate-bits", 3, "--choices", "2,7"), "--choices='2,7'"),
        (("--allocate-bits", 1.5), "--allocate-bits=1.5.*from 2 to 8"),
        (("--allocate-bits", 5, "--choices", "2,3,4"), "--allocate-bits=5.0.*from 2 to 4"),
        (("--allocate-bits", 3, "--text", "no/such/file"), "--text 'no/such/file' cannot be read"),
        (("--method", "kivi", "--out", "f"), "--method='kivi'.*qfilters"),
        (("--method", "qfilters", "--out", "no/such/folder/f"), "--out="),
        (("--method", "qfilters", "--out", "f", "--check", "--choices", "2"), "--choices, --check cannot be used"),
    ],
)
def test_refusals_before_a_model_is_loaded(words, message):
    result = run(*words)
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("error", "said"), [(0.04, False), (0.06, True)])
def test_a_gain_within_its_error_is_said(error, said):
    told = {"bits": [2, 4], "compressed_layers": [0, 1], "average": 3.0, "expected_kl": 0.2, "expected_kl_uniform": 0.3}
    lines = list(calibrate.explain(told | {"expected_gain": 0.1, "standard_error": error}, "uniform"))
    assert any("within two standard errors" in line for line in lines) == said
    assert "expected: mean KL 0.20000 nats, uniform 0.30000: 1.50 times less" in lines
