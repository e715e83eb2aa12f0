"""The README says what is true: its table, its commands, its version."""

import re

import typer

from tools.method_numbers import NOT_MEASURED, comparisons, in_short, title
from tools.readme import BLOCK, README, filled
from veloxquant_mlx import __version__
from veloxquant_mlx.cache.registry import METHODS
from veloxquant_mlx.cli import app
from veloxquant_mlx.quality.results import Comparison, Model, Needles, Row, Text

TEXT = README.read_text(encoding="utf-8")


def test_the_table_of_methods_is_up_to_date():
    assert filled(TEXT) == TEXT, "run: tools/dev.sh run python tools/readme.py"


def test_the_table_has_what_was_measured_of_every_method():
    found = comparisons()
    block = BLOCK.search(TEXT)
    assert block is not None
    lines = [line for line in block[0].splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == [*METHODS]
    assert f"| {' | '.join(map(title, found))} |" in block[0] and NOT_MEASURED not in block[0]


def test_a_cell_of_the_table_says_what_failed_and_what_saved_nothing():
    facts = Needles((9,), (0.5,), ("word", "number"), (((1.0, 0.0),),))
    held = {"packed": 2**20, "window": 0, "index": 0, "fixed": 0}
    rows = (
        Row("a", "kivi", "f", bits=4.25, bytes=held, mean_kl=0.0123, needle=facts),
        Row("b", "kivi", "f", error="no"),
        Row("c", "kivi", "f", bits=16.01, bytes=held, mean_kl=0.0),
        Row("d", "snapkv+kivi", "f", bits=2.0, bytes=held, mean_kl=0.5),
    )
    found = Comparison(Model("gemma3-x", "f", 2, 2, 64, 10), Text("t", "s", 9), 1024, 2, 0, {}, "m", rows=rows)
    cell = "1.0 MiB (4.25 bits): 0.0123, 50%<br>failed<br>saves nothing at 1,024 tokens (16.01 bits)"
    assert in_short(found, "kivi").replace("&nbsp;", " ") == cell
    assert in_short(found, "h2o") == NOT_MEASURED and title(found) == "Gemma 3 270M"


def test_the_commands_exist():
    named = set(re.findall(r"`veloxquant ([a-z-]+)", TEXT))
    commands = typer.main.get_command(app)
    assert named == set(commands.list_commands(typer.Context(commands)))  # type: ignore[attr-defined]


def test_readme_and_changelog_name_this_version():
    assert f"Version {__version__} " in TEXT
    assert f"## {__version__}\n" in README.with_name("CHANGELOG.md").read_text(encoding="utf-8")
