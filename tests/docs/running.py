"""Runs the blocks of a page one after the other, as a reader would: Python in one namespace, shell lines by rules.

The reader's folder holds tiny random models under the names that the pages use, and a text. A shell line without a rule
is an error, so that no line stands in a page untested.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from tests.docs.blocks import ROOT, Block
from tests.serve.served import make_folder, text
from veloxquant_mlx.cli import app, serve
from veloxquant_mlx.serve import Server

PLACES = ("my-model", "my-draft-model", "path/or/repository")
SERVED = "http://127.0.0.1:8080"  # what pages say; tests listen elsewhere


def furnish(folder: Path) -> None:
    """The reader's folder."""
    models = make_folder(folder / PLACES[0], "mistral")  # no limit of length, heads of 32
    for place in PLACES[1:]:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).symlink_to(models)
    (folder / "book.txt").write_text(text(3000, seed=1))


class Reader:
    """Works through a page in ``folder``, which is the current one."""

    def __init__(self, monkeypatch: Any) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.server: Server | None = None
        monkeypatch.setattr(serve, "run_server", self._serve)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def read(self, block: Block) -> None:
        if block.title is not None:
            if "/" not in block.title:  # those of the repository are for the tests of their page
                Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            source = block.text if self.server is None else block.text.replace(SERVED, self.server.url)
            # Blank lines before it: errors name the line of the page.
            exec(compile("\n" * (block.line - 1) + source, str(block.page), "exec"), self.names)
        elif block.language == "bash":
            for line in commands(block.text):
                self.shell(line, block.where)

    def shell(self, line: str, where: str) -> None:
        words = shlex.split(line, comments=True)
        if not words:
            return
        rule = RULES.get(words[0])
        assert rule is not None, f"{where}: no rule how to test {line!r}"
        rule(self, words, where)

    def _serve(self, options: Any, config: Any, level: str) -> None:
        self.close()
        self.server = Server(dataclasses.replace(options, port=0), config).__enter__()


def commands(text: str) -> list[str]:
    """Lines, those that end with a backslash joined with the next."""
    return re.sub(r"\s*\\\n\s*", " ", text).splitlines()


def veloxquant(reader: Reader, words: list[str], where: str) -> None:
    """Runs the command. Of those that need a real model, a network or a quiet machine the options are parsed."""
    if words[1] in ("demo", "doctor", "eval"):
        group: Any = typer.main.get_command(app)
        command = group.commands[words[1]]
        command.make_context(words[1], words[2:])
        return
    done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert done.exit_code == 0, f"{where}: {shlex.join(words)} exits with {done.exit_code}: {done.output}"


def pip(reader: Reader, words: list[str], where: str) -> None:
    """Installing needs a network; extras that it names must exist."""
    assert words[1] == "install", where
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for word in words[2:]:
        for extra in re.findall(r"\[([\w,]+)\]", word):
            for name in extra.split(","):
                assert re.search(rf"^{name} = \[", project, re.MULTILINE), f"{where}: there is no extra {name!r}"


def make(reader: Reader, words: list[str], where: str) -> None:
    """Targets must exist; they are the repository's own."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in words[1:]:
        assert re.search(rf"^{target}:", text, re.MULTILINE), f"{where}: there is no target {target!r}"


def script(reader: Reader, words: list[str], where: str) -> None:
    """Examples are run by tests of their own, tools by theirs: the file must be there."""
    file = words[1] if words[1] != "-m" else words[2].replace(".", "/") + ".py"
    assert (ROOT / file).is_file(), f"{where}: there is no {file}"


def curl(reader: Reader, words: list[str], where: str) -> None:
    """Asks the server of the page."""
    from urllib.request import urlopen

    assert reader.server is not None, f"{where}: no server was started"
    for word in words[1:]:
        if word.startswith("http"):
            assert urlopen(word.replace(SERVED, reader.server.url), timeout=10).status == 200, where


def dev(reader: Reader, words: list[str], where: str) -> None:
    """``tools/dev.sh run COMMAND``: the command that it runs."""
    assert words[1] == "run" and words[2] in ("python", "pytest", "veloxquant"), where
    for word in words[3:]:
        if "/" in word:
            assert os.path.exists(ROOT / word), f"{where}: there is no {word}"


Rule = Callable[[Reader, list[str], str], None]
RULES: dict[str, Rule] = {
    "veloxquant": veloxquant,
    "pip": pip,
    "make": make,
    "python": script,
    "curl": curl,
    "tools/dev.sh": dev,
}
