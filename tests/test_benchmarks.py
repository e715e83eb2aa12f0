"""The benchmarks of attention and of whole models run to their end, at sizes that say nothing."""

import json

import pytest

from benchmarks import common, decode_attention, end_to_end, plot, prefill_memory

RUNS = {
    "decode_attention": (
        decode_attention,
        "--lengths 256 512 1024 --batches 1 2 --most-gib 0.004 --rounds 1 --inner 2 --copy-mib 1",
    ),
    "end_to_end": (end_to_end, "--shape tiny --lengths 256 --prefill 600 --warm 1 --tokens 2"),
    "prefill_memory": (prefill_memory, "--history 512 --rows 8"),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    script, words = RUNS[name]
    script.main(words.split())
    (saved,) = tmp_path.glob("*.json")
    found = json.loads(saved.read_text())
    assert found["rows"] and not any("error" in row and isinstance(row["error"], str) for row in found["rows"])
    if name == "decode_attention":
        # K and V of 1,024 tokens take 4 MiB in 16 bits: with a limit of 4.1, two sequences of 512 are the most
        sizes = {(row["batch"], row["tokens"]) for row in found["rows"]}
        assert sizes == {(1, 256), (1, 512), (1, 1024), (2, 256), (2, 512)}
        # float32 sums of at most 1,024 terms, on the rows that the cache itself holds
        assert all(row["error"] < 1e-5 for row in found["rows"])
        assert {row["cache"] for row in found["settings"]["slopes"]} == {row["cache"] for row in found["rows"]}
        assert (tmp_path / "decode_attention_cpu.svg").read_text().startswith("<svg")
    if name == "end_to_end":
        assert {row["measured"] for row in found["rows"]} == {"decode", "prefill"}
        assert len(found["rows"]) == 2 * (len(end_to_end.METHODS) + 2)


def test_errors_are_recorded_and_not_raised():
    def fails():
        raise RuntimeError("no such kernel\nand more")

    assert end_to_end.attempt(fails) == {"error": "RuntimeError: no such kernel"}


def test_charts_place_points_by_their_logarithm():
    drawn = plot.svg("a & b", "tokens", {"batch 1": {"x": [(1024, 1.0), (4096, 1.0), (2048, 2.0)]}})
    places = drawn.partition('points="')[2].partition('"')[0].split()
    across, up = zip(*(map(float, place.split(",")) for place in places), strict=True)
    assert across[1] == pytest.approx((across[0] + across[2]) / 2, abs=0.1)
    assert up[0] == up[2] > up[1]  # upwards is less
    assert "a &amp; b" in drawn and ">2k<" in drawn
