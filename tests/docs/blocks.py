"""The code blocks of a Markdown page, in order."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(r"^([ \t]*)```(.*)$")


@dataclass(frozen=True)
class Block:
    """``info`` is what follows the fence, ``line`` the number of the first line of ``text``."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split(" ")[0]

    @property
    def title(self) -> str | None:
        """The file that a block shows: written by the tests of that page, not run where it stands."""
        found = re.search(r'title="([^"]+)"', self.info)
        return found[1] if found else None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The README and every page of the site."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks, those inside lists and other indented text too."""
    found: list[Block] = []
    info, start, lines = None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if info is None:
            if fence:
                info, start, lines = fence[2].strip(), number + 1, []
        elif fence and not fence[2].strip():
            found.append(Block(page, start, info, textwrap.dedent("\n".join(lines)) + "\n"))
            info = None
        else:
            lines.append(line)
    if info is not None:
        raise ValueError(f"{page}:{start}: a code block that does not end")
    return found
