"""The report in a headless browser: nothing is fetched, nothing is complained about, every plot is painted."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from playwright.sync_api import sync_playwright

from tests.quality.made import comparison
from veloxquant_mlx.quality import Row, report

pytestmark = pytest.mark.xdist_group("browser")  # started once
BROKEN = Row("broken", "kivi", "group quantization", error="ValueError: " + "a long story, " * 30)
NONE = "no browser: apt-get install chromium, or .venv/bin/playwright install chromium"


@dataclass
class Visit:
    """A page, and what it did when it was opened."""

    page: Any
    requests: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LD_PRELOAD", raising=False)  # OpenBLAS takes too much stack for the threads of a browser
        with sync_playwright() as playwright:
            own = Path(playwright.chromium.executable_path)
            names = ("chromium", "chromium-browser", "google-chrome")
            path = str(own) if own.exists() else next(filter(None, map(shutil.which, names)), None)
            if path is None:
                if os.environ.get("CI"):
                    pytest.fail(NONE, pytrace=False)
                pytest.skip(NONE)
            started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            yield started
            started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(report.html(comparison(BROKEN)), encoding="utf-8")
    return file.as_uri()


@pytest.fixture
def visit(browser, address, request) -> Iterator[Visit]:
    """Opens the page at the width and in the colours of the test."""
    width, colours = request.param
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=colours)
    seen = Visit(page)
    page.on("request", lambda one: seen.requests.append(one.url))
    page.on("console", lambda one: seen.said.append(one.text))
    page.on("pageerror", lambda one: seen.said.append(str(one)))
    page.goto(address)
    yield seen
    page.close()


def painted(shot: bytes) -> np.ndarray:
    """The picture as numbers in 0..1, without transparency."""
    return np.asarray(imread(io.BytesIO(shot), format="png"))[..., :3]


# Text that is cut off at an edge would stand outside of the drawing.
INSIDE = """box => {
    const b = box.querySelector("svg").getBoundingClientRect();
    return [...box.querySelectorAll("text")].map(text => text.getBoundingClientRect())
        .every(t => t.width > 0 && t.left >= b.left - 1 && t.right <= b.right + 1);
}"""
COLOURS = """() => {
    const rgb = (e, name) => getComputedStyle(e)[name].match(/[\\d.]+/g).slice(0, 3).map(Number);
    return ["figure svg text", "td", ".family", "p", ".lead", ".error", ".facts dt"].map(name => {
        const e = document.querySelector(name);
        return [name, rgb(e, e instanceof SVGElement ? "fill" : "color"), rgb(document.body, "backgroundColor")];
    });
}"""
WIDTHS = [(1280, "light"), (1280, "dark"), (390, "light")]


@pytest.mark.parametrize("visit", WIDTHS, indirect=True, ids=["light", "dark", "phone"])
def test_the_report_is_whole(visit, address):
    page = visit.page
    assert visit.requests == [address] and visit.said == []
    across = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert across[0] <= across[1]
    plots = page.locator("figure .scroll").all()
    assert len(plots) == 3
    for plot in plots:  # a narrow page shows a part of each, the rest scrolls
        box = plot.locator("svg").bounding_box()
        assert box["width"] >= 700 and box["height"] >= 300
        assert plot.evaluate(INSIDE)
        pixels = painted(plot.screenshot())
        differs = np.abs(pixels - pixels[3, 3]).max(axis=-1) > 0.1
        colours = (pixels[differs] * 8).astype(int) @ [100, 10, 1]
        assert differs.mean() > 0.01 and len(np.unique(colours)) > 8
        # All over the picture, not in a corner.
        assert differs.any(axis=0).mean() > 0.6 and differs.any(axis=1).mean() > 0.4
    heights = page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.getBoundingClientRect().height)")
    assert len(heights) == len(comparison().rows) + 2 and min(heights) > 15


@pytest.mark.parametrize("visit", [(1280, "light"), (1280, "dark")], indirect=True, ids=["light", "dark"])
def test_text_is_legible(visit):
    """Contrast of at least 4.5 (WCAG AA) between the text of plots and of the table and the page behind them."""
    colours = visit.page.evaluate(COLOURS)

    def light(rgb):
        parts = [c / 255 for c in rgb]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    for name, text, back in colours:
        high, low = sorted((light(text), light(back)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (name, text, back)


@pytest.mark.parametrize("visit", [(390, "light")], indirect=True, ids=["phone"])
def test_wide_parts_scroll_and_the_names_stay(visit):
    moved = visit.page.evaluate(
        """() => { const box = document.querySelector("table").parentElement; box.scrollLeft = 300;
            const name = document.querySelector("tbody th").getBoundingClientRect();
            return [box.scrollLeft, name.left - box.getBoundingClientRect().left]; }"""
    )
    assert moved[0] == 300 and abs(moved[1]) <= 1


def test_a_page_that_would_fetch_something_is_noticed(browser, tmp_path):
    """That the checks above can fail; the policy of the page stops it besides."""
    file = tmp_path / "report.html"
    text = report.html(comparison()).replace("<h1>", '<img src="http://127.0.0.1:9/x.png" alt=""><h1>', 1)
    file.write_text(text, encoding="utf-8")
    page, said = browser.new_page(), []
    page.on("console", lambda one: said.append(one.text))
    page.goto(file.as_uri())
    page.close()
    assert any("Content Security Policy" in one for one in said)
