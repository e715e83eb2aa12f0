"""The command line, in process: what it prints, and that a wrong word gives one readable line and exit code 2."""

import json
import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.conftest import MODELS
from veloxquant_mlx import __version__
from veloxquant_mlx.cache.registry import METHODS
from veloxquant_mlx.cli import app, doctor, generate
from veloxquant_mlx.core.text import size
from veloxquant_mlx.models.gguf import ensure_model

RUNNER = CliRunner()
COMMANDS = ["demo", "generate", "calibrate", "ruler", "eval", "auto-config", "methods", "doctor"]


def run(*words):
    return RUNNER.invoke(app, list(words))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    rows = re.findall(r"│ \*? *(--[a-z-]+)(.*)│", plain)
    assert rows
    assert all(re.search(r"[A-Z][a-z]+", text) for _, text in rows), rows


def test_the_bare_command_lists_the_commands():
    result = run()
    assert all(command in result.output for command in COMMANDS)


def test_version():
    assert run("--version").output.strip() == __version__


def test_methods_lists_all():
    assert [entry["name"] for entry in json.loads(run("methods", "--json").output)] == list(METHODS)


def test_methods_table_names_every_method_once(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    output = run("methods").output
    first_words = [line.split()[0] for line in output.splitlines() if line.split()]
    assert all(first_words.count(name) == 1 for name in METHODS)


@pytest.mark.parametrize(
    ("seq_len", "memory", "chosen"),
    [("1000", "64", "turboquant_rvq"), ("4096", "64", "kivi"), ("32768", "64", "kvquant"), ("4096", "0.001", "gear")],
)
def test_auto_config_follows_the_rules(seq_len, memory, chosen):
    result = run("auto-config", "--head-dim", "128", "--seq-len", seq_len, "--memory", memory, "--json")
    told = json.loads(result.output)
    assert told["config"]["method"] == chosen
    assert told["fp16_kv_bytes"] == 2 * 2 * 128 * int(seq_len)


def test_auto_config_explains():
    result = run("auto-config", "--head-dim", "128", "--seq-len", "32768", "--memory", "1", "--explain")
    assert result.exit_code == 0
    assert "long context" in result.output
    assert "16.0 MiB" in result.output


BAD = [
    (("auto-config", "--head-dim", "100", "--seq-len", "10"), "head_dim=100 .* power of 2"),
    (("generate", "--model", "m", "--prompt", "p", "--method", "kivvi"), "unknown method 'kivvi'"),
    (("generate", "--model", "m", "--prompt", "p", "--option", "group=3"), "kivi_group_size"),
    (("generate", "--model", "m", "--prompt", "p", "--option", "kivi_group_size"), "name=value"),
    (("generate", "--model", "./no/such/folder", "--prompt", "p"), "not a folder"),
    (("generate", "--model", "m", "--prompt", "a\udcff"), "character 1 is not UTF-8"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_a_wrong_word_gives_one_line_and_code_2(words, message):
    result = run(*words)
    assert result.exit_code == 2
    assert re.search(message, result.stderr)
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "words",
    [
        ("generate",),
        ("generate", "--nope"),
        ("nope",),
        ("auto-config", "--head-dim", "x"),
        ("auto-config", "--head-dim", "64", "--seq-len", "9", "--memory", "inf"),
    ],
)
def test_typing_errors_are_usage_errors(words):
    result = run(*words)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_prompt_without_tokens_is_refused(monkeypatch):
    tokenizer = SimpleNamespace(chat_template=None, encode=lambda text: [])
    monkeypatch.setattr(generate, "load", lambda name: (None, tokenizer))
    result = run("generate", "--model", "m", "--prompt", "")
    assert result.exit_code == 2
    assert result.stderr == "error: --prompt cannot be used: it has no tokens. Give some text.\n"


def test_a_terminal_without_unicode(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    result = CliRunner(charset="ascii").invoke(app, ["methods"])
    assert result.exit_code == 0
    assert result.output.isascii()


def test_doctor_finds_this_machine_working():
    result = run("doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(result.output)}
    assert result.exit_code == 0
    assert found["seam"]["state"] == "ok"
    assert __version__ in found["versions"]["value"]
    assert "kivi" in found["methods"]["value"]


def test_doctor_says_how_to_fix_a_slow_blas(monkeypatch):
    monkeypatch.setattr(doctor, "_gflops", lambda dtype: 2.0)
    monkeypatch.setattr(doctor.mx, "default_device", lambda: doctor.mx.Device(doctor.mx.cpu))
    monkeypatch.setattr(doctor.mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(doctor.mx.cuda, "is_available", lambda: False)
    result = run("doctor")
    assert "libopenblas0-pthread" in result.output
    assert "LD_PRELOAD" in result.output


def test_doctor_exits_with_1_when_something_is_broken(monkeypatch):
    monkeypatch.setattr(doctor, "_seam", lambda: doctor.Finding("seam", "no", "broken", "Report this."))
    assert run("doctor").exit_code == 1


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**51, "2048.0 TiB")]
)
def test_size(n, text):
    assert size(n) == text


@pytest.mark.real_model
def test_generate_answers_and_reports():
    model = str(ensure_model("smollm2", MODELS))
    words = ("generate", "--model", model, "--prompt", "What is the capital of France?", "--max-tokens", "12")
    result = run(*words, "--method", "kivi", "--bits", "4", "--option", "residual_length=32", "--report")
    assert result.exit_code == 0
    assert "Paris" in result.stdout
    assert "keys and values held" in result.stderr
    assert "kivi" in result.stdout
    plain = run(*words, "--method", "none")
    assert "Paris" in plain.stdout


@pytest.mark.real_model
def test_generate_refuses_a_bad_value_before_generating():
    model = str(ensure_model("smollm2", MODELS))
    result = run("generate", "--model", model, "--prompt", "p", "--option", "kivi_group_size=7")
    assert result.exit_code == 2
    assert "residual_length=128 cannot be used" in result.stderr
    assert "kivi_group_size = 7" in result.stderr
    assert result.stdout == ""
