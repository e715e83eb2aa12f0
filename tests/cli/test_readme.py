"""The README says what is true: its table, its commands, its version."""

import re

import typer

from tools.readme import README, filled
from veloxquant_mlx import __version__
from veloxquant_mlx.cache.registry import METHODS, method
from veloxquant_mlx.cli import app

TEXT = README.read_text(encoding="utf-8")


def test_the_table_of_methods_is_up_to_date():
    assert filled(TEXT) == TEXT, "run: tools/dev.sh run python tools/readme.py"


def test_the_count_of_missing_methods_is_right():
    missing = sum(not method(name).built for name in METHODS)
    assert re.findall(r"- (\d+) methods? .*still to come", TEXT) == [str(missing)] * (missing > 0)


def test_the_commands_exist():
    named = set(re.findall(r"`veloxquant ([a-z-]+)", TEXT))
    commands = typer.main.get_command(app)
    assert named == set(commands.list_commands(typer.Context(commands)))  # type: ignore[attr-defined]


def test_readme_and_changelog_name_this_version():
    assert f"Version {__version__} " in TEXT
    assert f"## {__version__}\n" in README.with_name("CHANGELOG.md").read_text(encoding="utf-8")
