"""docs/coverage.md: what every method can do, and which kinds of models it serves, each cell from tests.

A test fills a cell with ``@pytest.mark.covers(column)``; its parameter ``row`` (of tests/matrix.py) or ``config``
gives the method, or the mark does: ``covers("server", method="kivi")``. ``cell="no: drops tokens"`` marks a test that
proves a refusal. ``covers("kinds", kind="llama")`` is a cell of the second table. All tests of a cell must say the same
and pass.

    python tools/coverage_tables.py            runs the tests that fill cells and writes the tables if all pass
    python tools/coverage_tables.py --passed   only collects them, after a run of all tests has passed, and writes
    python tools/coverage_tables.py --check    only collects them; fails where the tables in docs/ say something else
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "docs" / "coverage.md"
COLUMNS = ("generate", "batch", "trim", "speculative", "save/load", "deepcopy", "server", "tensor-parallel")
KINDS = "kinds"
MISSING = "not tested"
HEAD = """# What works

Written by `python tools/coverage_tables.py` from the outcome of the tests that fill the cells: "yes" is a passing test,
"no" is a test that the call is refused, with the reason.
"""

Cells = dict[tuple[str, str], set[str]]  # (row, column) -> what its tests say


class Recorder:
    """Collects the cells of all tests with a ``covers`` mark, and runs no others."""

    def __init__(self) -> None:
        self.methods: Cells = {}
        self.kinds: Cells = {}
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        others = [item for item in items if item.get_closest_marker("covers") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("covers") is not None]
        for item in items:
            for mark in item.iter_markers("covers"):
                self.add(item, *mark.args, **mark.kwargs)

    def add(
        self, item: pytest.Item, column: str, cell: str = "yes", method: str | None = None, kind: str | None = None
    ) -> None:
        if column not in (*COLUMNS, KINDS):
            raise pytest.UsageError(f"{item.nodeid}: covers({column!r}); valid: {', '.join((*COLUMNS, KINDS))}")
        params = getattr(getattr(item, "callspec", None), "params", {})
        name = method or getattr(params.get("row", params.get("config")), "method", None)
        if name is None:
            raise pytest.UsageError(
                f"{item.nodeid}: covers({column!r}) needs a parameter 'row' or 'config', or method=..."
            )
        cells, key = (self.methods, (name, column)) if kind is None else (self.kinds, (kind, name))
        cells.setdefault(key, set()).add(cell)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def table(corner: str, cells: Cells, rows: list[str], columns: list[str]) -> str:
    """A Markdown table; UsageError where tests of one cell disagree."""
    lines = [f"| {corner} | {' | '.join(columns)} |", "|" + " --- |" * (len(columns) + 1)]
    for row in rows:
        found = []
        for column in columns:
            said = cells.get((row, column), {MISSING})
            if len(said) > 1:
                raise pytest.UsageError(f"tests disagree on {column!r} of {row!r}: {sorted(said)}")
            found += said
        lines.append(f"| {row} | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def kinds_table(cells: Cells, kinds: list[str], methods: list[str]) -> str:
    """One line per kind: whether batches work, and the methods for which the answer is not "yes"."""
    lines = ["| kind of model | batch | methods |", "| --- | --- | --- |"]
    for kind in kinds:
        answers: dict[str, list[str]] = {}
        tested = [name for name in methods if (kind, name) in cells]
        for name in ("batch", *tested):
            said = cells.get((kind, name), {MISSING})
            if len(said) > 1:
                raise pytest.UsageError(f"tests disagree on {name!r} of {kind!r}: {sorted(said)}")
            answers.setdefault(next(iter(said)), []).append(name)
        batch = next(said for said, names in answers.items() if "batch" in names)
        groups = {said: [name for name in names if name != "batch"] for said, names in answers.items()}
        parts = [f"{', '.join(names)}: {said}" for said, names in groups.items() if names and said != "yes"]
        whole = [said for said, names in groups.items() if names == tested]
        scope = "all" if tested == methods else f"of {len(tested)} that stand for all"
        cell = f"{scope}: {whole[0]}" if whole else f"{scope} yes but {'; '.join(parts)}"
        lines.append(f"| {kind} | {batch} | {cell} |")
    return "\n".join(lines) + "\n"


def render(seen: Recorder) -> str:
    methods = sorted({name for name, _ in seen.methods})
    kinds = list(dict.fromkeys(kind for kind, _ in seen.kinds))
    return "\n".join(
        [
            HEAD,
            "## Methods\n",
            table("method", seen.methods, methods, list(COLUMNS)),
            "## Kinds of models\n",
            "Tiny random models of mlx_lm's own classes. Layers with a sliding window, chunked attention or recurrent",
            "state keep the model's own cache beside the compressed ones; the receipt says so, layer by layer.\n",
            kinds_table(seen.kinds, kinds, methods),
            "Vision-language models of mlx-vlm (pictures, left-padded batches) are tested where the extra `vlm` is",
            "installed: tests/models/test_vlm.py.\n",
        ]
    )


def main(arguments: list[str]) -> int:
    check, seen = "--check" in arguments, Recorder()
    collect = check or "--passed" in arguments
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / "tests")]
    code = pytest.main([*options, "--collect-only", "-qq"] if collect else options, plugins=[seen])
    if code or seen.failed:
        print("not all tests that fill cells pass, so there are no tables:", *seen.failed, sep="\n  ", file=sys.stderr)
        return 1
    text = render(seen)
    if not check:
        TABLES.parent.mkdir(exist_ok=True)
        TABLES.write_text(text)
        return 0
    if TABLES.is_file() and TABLES.read_text() == text:
        return 0
    print(f"{TABLES.relative_to(ROOT)} is stale: run python tools/coverage_tables.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
