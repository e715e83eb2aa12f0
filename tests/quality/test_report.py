"""The page and the pictures of a comparison: what stands in them, what is told where something is missing."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.quality.made import comparison, row
from tools import method_numbers, picture
from veloxquant_mlx.quality import Row, labels, plots, report
from veloxquant_mlx.quality.results import front

BROKEN = Row("broken", "kivi", "group quantization", error="ValueError: a <b> & c")
PAIR = row("snapkv + kivi", "snapkv+kivi", "eviction + group quantization", random.Random(5))
FOUND = comparison(BROKEN, replace(PAIR, notes=("keys & values",)))
VOID = {"meta", "link"}


@pytest.fixture(scope="module")
def page() -> str:
    return report.html(FOUND)


class Outline(HTMLParser):
    """Ids, tags that are not closed in order, and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.wrong: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [told[name] or "" for name in ("src", "href", "xlink:href") if name in told]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(page):
    seen = Outline(page)
    assert not seen.wrong and not seen.open
    assert len(seen.ids) == len(set(seen.ids))
    assert seen.links and all(link.startswith(("#", "data:")) for link in seen.links)
    assert all(f'id="{link[1:]}"' in page for link in seen.links if link.startswith("#"))
    assert "<script" not in page and "@import" not in page and "url(http" not in page


def test_every_row_stands_in_the_table_and_in_the_plots(page):
    for one in FOUND.rows:
        assert f">{one.label}</th>" in page
    assert page.count('<tr class="best">') == len(front(FOUND.rows))
    assert "failed: ValueError: a &lt;b&gt; &amp; c</td>" in page and "1 failed." in page
    assert page.count("<svg xmlns=") == 3 and page.count('role="img"') == 3
    tips = re.findall(r'dot-\d+"><title>(.*?): ', page)
    assert tips == [one.label for one in FOUND.rows if one.error is None]
    assert "<b>snapkv + kivi</b>: keys &amp; values" in page and "two methods" in page


def test_where_the_figures_come_from_and_what_they_mean_is_said(page):
    for told in ("tiny &lt;model&gt;", "book.txt, 1,500 tokens", "1,024 tokens as the prompt", "CPU x86_64, 2 cores"):
        assert told in page
    assert "mlx 0.32.4, numpy 2.0" in page and "<dt>Seed</dt><dd>7</dd>" in page and "perplexity 12.50" in page
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', page)
    assert heads == ["method", "family", *re.findall(r"<dt>([^<]+)</dt><dd>", page.split("What the figures mean")[1])]


def test_the_same_results_give_the_same_page(page):
    assert report.html(FOUND) == page


def test_figures_that_were_not_measured_are_left_out():
    held = {"packed": 4, "window": 0, "index": 0, "fixed": 0}
    bare = Row("bare", "kivi", "group quantization", bytes=held, bytes_16=16, bits=4.0, ratio=4.0, mean_kl=0.0)
    page = report.html(replace(FOUND, uncompressed=None, rows=(bare,)))
    assert page.count("<svg xmlns=") == 1 and "Needles</h2>" not in page and "Error per layer" not in page
    assert "uncompressed</th>" not in page and "<details>" not in page and "1 row," in page
    nothing = report.html(replace(FOUND, rows=(BROKEN,)))
    assert (
        "0 rows," in nothing
        and nothing.count("<svg xmlns=") == 0
        and "failed: ValueError" in nothing
        and not Outline(nothing).wrong
    )


def test_needles_of_other_texts_do_not_share_a_plot():
    first, second = FOUND.rows[:2]
    assert first.needle is not None
    other = replace(second, needle=replace(first.needle, lengths=(1, 2)))
    drawn = plots.needle_plot(replace(FOUND, uncompressed=None), [first, other])
    assert drawn is not None and first.label in drawn and second.label not in drawn


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"veloxquant-mlx\[plots\]"):
        report.html(FOUND)


def test_the_front_goes_down_as_bytes_grow():
    best = sorted(front(FOUND.rows), key=plots.held)
    losses = [one.mean_kl or 0 for one in best]
    assert len(best) > 2 and losses == sorted(losses, reverse=True)
    assert [plots.held(one) for one in best] == pytest.approx([16 * (one.nbytes or 0) / 2**24 for one in best])


def test_a_method_with_one_row_is_called_by_its_name():
    called = plots.names(FOUND.rows)
    assert called["snapkv, 512 tokens"] == "snapkv" and called["kivi, 4 bits"] == "kivi, 4 bits"


def test_every_family_has_a_look_of_its_own():
    families = {plots.kind(one) for one in FOUND.rows}
    looks = [plots.look(family) for family in families]
    assert len({colour for colour, _ in looks}) == len({mark for _, mark in looks}) == len(families)


# -------------------------------------------------------------------------------------------------- names of points


def test_names_do_not_lie_on_each_other_nor_on_points():
    rng = random.Random(3)
    points = [(rng.uniform(20, 580), rng.uniform(20, 380)) for _ in range(45)]
    sizes = [(rng.uniform(25, 90), 10.0) for _ in points]
    edge, wall = (0.0, 0.0, 600.0, 400.0), (300.0, 0.0, 302.0, 400.0)
    placed = labels.place(points, sizes, edge, [wall])
    boxes = [box for box in placed if box is not None]
    assert len(boxes) > 40
    dots = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    for i, box in enumerate(boxes):
        assert min(box) >= 0 and box[2] <= 600 and box[3] <= 400
        assert not any(labels.overlap(box, other) for other in (*boxes[:i], *dots, wall))
    for box, (width, height) in zip(placed, sizes, strict=True):
        assert box is None or (box[2] - box[0], box[3] - box[1]) == pytest.approx((width, height))
    for box, (x, y) in zip(placed, points, strict=True):
        far = 0.0 if box is None else labels.nearest(box, x, y)[2]
        if box is not None and far <= labels.FAR:  # no line says whose it is
            assert far == min(labels.nearest(box, *point)[2] for point in points)


def test_a_name_without_room_is_left_out_and_the_first_comes_first():
    placed = labels.place([(20, 5), (20, 5)], [(15, 8), (15, 8)], (0, 0, 45, 10))
    assert placed[0] is not None and placed[1] is None


def test_the_nearest_place_of_a_box():
    assert labels.nearest((0, 0, 10, 10), 13, 14) == (10, 10, 5)
    assert labels.nearest((0, 0, 10, 10), 5, 5) == (5, 5, 0)


# --------------------------------------------------------------------------------------------------------- a picture


def test_the_picture_of_the_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [tmp_path / "compare_smollm2.json", tmp_path / "compare_other.json"]
    for file, name in zip(files, ("smollm2-float32", "other"), strict=True):
        file.write_text(replace(FOUND, model=replace(FOUND.model, name=name)).to_json())
    for name in ("a.svg", "b.svg", "c.png"):
        assert picture.main([*map(str, files), "--out", str(tmp_path / name)]) == 0
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    told = [element.text or "" for element in root if element.tag.endswith(("title", "desc"))]
    assert told[0] == "What compression costs and saves" and "SmolLM2-135M, other" in told[1]
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "var(--" not in (tmp_path / "a.svg").read_text()  # a picture by itself has no page around it
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


def test_no_picture_without_results(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(method_numbers, "RESULTS", tmp_path)
    assert picture.main([]) == 1 and "no results" in capsys.readouterr().err
