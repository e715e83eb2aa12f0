"""The pages of the methods: what they take from the code, and that they say so when it changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tools import method_numbers, method_pages
from tools.method_notes import NOTES
from veloxquant_mlx.cache.registry import METHODS, method
from veloxquant_mlx.quality import Comparison, Needles, Row
from veloxquant_mlx.quality.results import Model, Text


def test_every_method_has_its_words() -> None:
    assert list(NOTES) == list(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_page_holds_all_that_the_code_says(name: str) -> None:
    text = method_pages.page(name)
    info = method(name).info
    for field in dataclasses.fields(info.options) if info.options else ():
        assert f"| `{field.name}` |" in text and method_pages.cell(field.metadata["valid"].text) in text
    assert all(f"| `{field}` |" in text for field in info.reads)
    assert info.arxiv is None or f"https://arxiv.org/abs/{info.arxiv}" in text
    assert "``" not in text.replace("```", "") and method_pages.docstring(method(name))[0].replace("``", "`") in text


def test_packed_bits_are_those_of_the_arithmetic() -> None:
    """Two bits in groups of 32 with two float16 each: 3; TurboQuant: 4 bits and a float16 per row of 128."""
    assert method_pages.packed_bits(method_pages.recipe("kivi").keys) == 3
    assert method_pages.packed_bits(method_pages.recipe("turboquant_rvq").keys) == 4 + 16 / 128
    assert method_pages.packed_bits(method_pages.recipe("snapkv").keys) is None  # not packed
    assert method_pages.packed_bits(method_pages.recipe("kvtc").keys) is None  # it depends on the data


def test_a_stale_page_and_a_stray_one_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(method_pages, "ROOT", tmp_path)
    monkeypatch.setattr(method_pages, "PAGES", tmp_path)
    pages = {tmp_path / "kivi.md": "new\n"}
    monkeypatch.setattr(method_pages, "render", lambda: pages)
    assert method_pages.main([]) == 0 and method_pages.main(["--check"]) == 0
    (tmp_path / "kivi.md").write_text("old\n")
    (tmp_path / "gone.md").write_text("")
    assert method_pages.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "kivi.md is stale" in said and "gone.md is stale" in said
    assert method_pages.main([]) == 0 and not (tmp_path / "gone.md").exists()


def test_committed_comparisons_stand_on_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needle = Needles((512,), (0.5,), ("word", "number"), (((1.0, 0.0),),))
    rows = (
        Row("kivi, 4 bits", "kivi", "group", bits=5.5, ratio=2.9, mean_kl=0.0026, top1_flips=0.03, needle=needle),
        Row("both", "snapkv+kivi", "eviction", error="out of\nmemory"),
        Row("h2o", "h2o", "eviction", bits=4.0),
    )
    found = Comparison(Model("tiny", "f", 2, 2, 64, 10), Text("t", "s", 9), 8, 2, 0, {}, "a machine", rows=rows)
    (tmp_path / "compare_tiny.json").write_text(found.to_json())
    monkeypatch.setattr(method_numbers, "RESULTS", tmp_path)
    lines = list(method_numbers.compared("kivi"))
    assert "| kivi, 4 bits | 5.50 | 2.90 | 0.0026 | 3% | 50% | – | – |" in lines
    assert "| both | failed: out of memory | | | | | | |" in lines
    assert not any("h2o" in line for line in lines) and list(method_numbers.compared("tova")) == []
