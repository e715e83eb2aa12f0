"""Every code block of the README and the documentation runs, every link leads somewhere, every page is in the menu."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import DOCS, ROOT, Block, blocks, pages
from tests.docs.running import Reader, commands, furnish

LANGUAGES = {"python", "bash", "json", "text"}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PAGES = [page for page in pages() if blocks(page)]


def name(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reader")
    furnish(made)
    return made


@pytest.fixture
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.chdir(folder)
    one = Reader(monkeypatch)
    yield one
    one.close()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_of_a_page_runs(page: Path, reader: Reader) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.where}: say which language this block is: {LANGUAGES}"
        reader.read(block)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("rm -rf /", "no rule"),
        ("pip install '.[nonsense]'", "no extra 'nonsense'"),
        ("make nonsense", "no target"),
        ("python examples/nonsense.py", "there is no"),
        ("veloxquant methods --nonsense", "exits with 2"),
    ],
)
def test_a_wrong_shell_line_is_found(line: str, error: str, reader: Reader) -> None:
    with pytest.raises(AssertionError, match=error):
        reader.shell(line, "page:1")


def test_an_error_names_the_line_of_its_page(reader: Reader) -> None:
    block = Block(DOCS / "quickstart.md", 7, "python", "x = 1\nraise ValueError('here')\n")
    with pytest.raises(ValueError, match="here") as caught:
        reader.read(block)
    last = caught.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(block.page), 8)


def test_lines_are_joined_and_blocks_are_found_where_they_stand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('# A\n\n- in a list:\n\n  ```python title="b.py"\n  x = 1\n  ```\n\n```bash\none \\\n  two\n```\n')
    first, second = blocks(page)
    assert (first.language, first.title, first.line, first.text) == ("python", "b.py", 6, "x = 1\n")
    assert commands(second.text) == ["one two"]
    page.write_text("```python\n")
    with pytest.raises(ValueError, match="does not end"):
        blocks(page)


def anchors(page: Path) -> set[str]:
    """Ids of the headings of a page, as mkdocs and GitHub make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in LINK.findall(re.sub(r"`[^`]*`", "", text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{name(page)}: {target}"
        assert page == ROOT / "README.md" or file.is_relative_to(DOCS), f"{name(page)}: {target} is not in the site"
        assert not anchor or anchor in anchors(file), f"{name(page)}: {target}"


def listed(menu: Any) -> Iterator[str]:
    """The files of mkdocs.yml's menu."""
    if isinstance(menu, str):
        yield menu
    else:
        for part in menu.values() if isinstance(menu, dict) else menu:
            yield from listed(part)


def test_the_menu_holds_every_page_once() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    there = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed(menu)) == sorted(there)


def test_drawings_need_no_network_and_no_script() -> None:
    for drawing in DOCS.rglob("*.svg"):
        text = drawing.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "://" not in text and "<script" not in text and "<title" in text, drawing


def test_the_pages_of_the_methods_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "method_pages.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
