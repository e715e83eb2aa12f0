"""The comparison on a tiny model: figures that are known, rows that fail, runs that are broken off."""

import importlib
import json
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.cache.registry import METHODS, method
from veloxquant_mlx.core.exceptions import (
    ArtifactDamagedError,
    ArtifactNotFoundError,
    CacheInputError,
    QuantizerConfigError,
)
from veloxquant_mlx.quality import Comparison, Plan, compare, measure, plans, probes, reference
from veloxquant_mlx.quality.plans import SHORT, SHOWN, families
from veloxquant_mlx.quality.results import COLUMNS, Needles, write

TOKENIZER = SimpleNamespace(encode=lambda text: [ord(c) for c in text], bos_token_id=None, chat_template=None)
TEXT = "".join(chr(32 + t % 90) for t in tiny.tokens(620)[0].tolist())  # type: ignore[union-attr]
KIVI = Plan("kivi", "kivi", {"bit_width_inlier": 4, "residual_length": 32})
EXACT = Plan("exact", "streaming_llm", {"stream_window_size": 600})
BAD = Plan("bad", "kivi", {"kivi_group_size": -1})
ENGINE = importlib.import_module("veloxquant_mlx.quality.compare")  # as an attribute, its name is the function
FIXED = ("seconds", "decode_speed", "prefill_peak")  # what a second run need not repeat


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


def run(model, chosen, **how) -> Any:
    settings: dict[str, Any] = {"ctx": 500, "scored": 8, "depths": (0.2, 0.8), "keys": ("word",)}
    return compare(model, TOKENIZER, chosen, TEXT, **{**settings, **how})


@pytest.fixture(scope="module")
def found(model) -> Comparison:
    return run(model, [KIVI, BAD, EXACT])


def same(row):
    return replace(row, **dict.fromkeys(FIXED, 0.0))


def test_figures_are_those_of_a_single_measurement(model, found):
    tokens, row = TOKENIZER.encode(TEXT)[:508], found.rows[0]
    truth = reference(model, tokens, 500)
    config = KVCacheConfig(method="kivi", **KIVI.fields)
    alone = measure(
        model, tokens, lambda: KVCacheBuilder.for_model(model, config), 500, truth=truth, kv_dtype=mx.float16
    )
    assert (row.mean_kl, row.p99_kl, row.ratio) == (alone.mean_kl, alone.p99_kl, alone.ratio)
    assert row.top1_flips == 1 - alone.top1_agreement
    assert row.nbytes == alone.kv_bytes and row.bytes_16 == truth.bytes_16
    # Every layer is compressed here: the bits are what the ratio says of 16, all constants counted in both.
    assert row.bits == pytest.approx(16 / row.ratio)
    assert 4 < row.bits < 9 and row.error is None and row.decode_speed > 0 < row.prefill_peak
    target = np.array(tokens[500:])
    nll = -truth.run.logprobs[np.arange(8), target].mean()
    assert found.uncompressed is not None and found.uncompressed.perplexity == pytest.approx(np.exp(nll), rel=1e-5)


def test_the_error_of_a_layer_is_nought_where_nothing_is_lost_and_grows_with_fewer_bits(model, found):
    exact = found.rows[2]
    # float16 rows of a window that holds all tokens: eleven bits of mantissa, through two layers.
    assert all(error < 2e-3 for error in exact.layer_error) and exact.mean_kl < 1e-5
    assert exact.perplexity_ratio == pytest.approx(1, abs=1e-3) and exact.top1_flips == 0
    two = run(model, [replace(KIVI, fields={**KIVI.fields, "bit_width_inlier": 2})], keys=()).rows[0]
    four = found.rows[0]
    assert len(two.layer_error) == 2 and all(
        a > 2 * b > 0 for a, b in zip(two.layer_error, four.layer_error, strict=True)
    )


def test_a_row_that_fails_says_why_and_the_others_are_measured(found):
    bad = found.rows[1]
    assert bad.error.startswith("QuantizerConfigError: kivi_group_size=-1 cannot be used") and "\n" not in bad.error
    assert bad.mean_kl is bad.bytes is bad.needle is None
    assert [row.error is None for row in found.rows] == [True, False, True]


def test_any_exception_of_a_method_is_its_row(model, monkeypatch):
    def broken(config, layer):
        raise RuntimeError("no\nroom")

    monkeypatch.setattr(method("kivi").module, "recipe", broken)
    rows = run(model, [KIVI, EXACT], keys=()).rows
    assert rows[0].error == "RuntimeError: no room" and rows[1].error is None


def test_predictions_that_are_no_numbers_are_an_error(model, monkeypatch):
    forced = ENGINE.teacher_force

    def spoiled(model, tokens, caches, *args, **kwargs):
        run = forced(model, tokens, caches, *args, **kwargs)
        return replace(run, logprobs=run.logprobs * np.nan) if hasattr(caches[0], "describe") else run

    monkeypatch.setattr(ENGINE, "teacher_force", spoiled)
    (row,) = run(model, [KIVI], keys=()).rows
    assert row.error == "CacheStateError: the predictions are not finite numbers"


def test_warnings_of_a_method_are_notes(model, monkeypatch):
    whole = method("kivi").module.recipe

    def warned(config, layer):
        warnings.warn("mind\nthe gap", UserWarning, stacklevel=2)
        return whole(config, layer)

    monkeypatch.setattr(method("kivi").module, "recipe", warned)
    (row,) = run(model, [KIVI], keys=()).rows
    assert row.error is None and row.notes.count("mind the gap") == 1


def test_the_same_seed_gives_the_same_numbers(model, found):
    again = run(model, [KIVI, BAD, EXACT])
    assert list(map(same, again.rows)) == list(map(same, found.rows))
    assert json.loads(again.to_json())["versions"] == json.loads(found.to_json())["versions"]


def test_needles_have_a_score_for_every_length_depth_and_key(found):
    needle = found.rows[0].needle
    assert (needle.lengths, needle.depths, needle.keys) == ((500,), (0.2, 0.8), ("word",))
    assert np.array(needle.score).shape == (1, 2, 1) and 0 <= needle.mean <= 1
    assert found.uncompressed.needle.lengths == (500,)


def test_needles_are_left_out_where_they_do_not_fit_and_the_row_says_so(model):
    (row,) = run(model, [KIVI], depths=probes.DEPTHS, keys=(*probes.KEYS, "word")).rows
    assert row.needle is row.copy is None and row.mean_kl is not None
    assert any("15 needles do not fit into 500 tokens" in note for note in row.notes)


def test_copying_is_relative_to_the_uncompressed_cache(model, monkeypatch):
    shares = iter([0.8, 0.4])
    monkeypatch.setattr(ENGINE.probes, "run", lambda *_, **__: probes.Answers(((1.0,), (0.0,)), next(shares)))
    found = run(model, [KIVI])
    assert found.uncompressed.copy == 0.8 and found.rows[0].copy == 0.5 and found.rows[0].needle.mean == 0.5


def test_what_was_measured_is_not_measured_again(model, found, monkeypatch):
    seen = []
    again = run(model, [KIVI, EXACT], before=found, progress=lambda *_: seen.append(1), done=seen.append)
    assert again == found and not seen
    more = Plan("kivi 2", "kivi", {"residual_length": 32})
    labels = []
    after = run(
        model, [KIVI, BAD, more], before=found, progress=lambda label, *_: labels.append(label), done=seen.append
    )
    # The row that failed is tried again, the others stay as they are, seconds included.
    assert list(dict.fromkeys(labels)) == ["uncompressed", "bad", "kivi 2"]
    assert [row.label for row in after.rows] == ["kivi", "exact", "bad", "kivi 2"]
    assert after.rows[0] is found.rows[0] and [len(one.rows) for one in seen] == [3, 4]


def test_a_run_that_is_broken_off_goes_on_where_it_was(model, found):
    kept = []

    def once(now):
        kept.append(Comparison.from_json(now.to_json()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, [KIVI, EXACT], done=once)
    labels = []
    whole = run(model, [KIVI, EXACT], before=kept[0], progress=lambda label, *_: labels.append(label))
    assert "kivi" not in labels
    assert list(map(same, whole.rows)) == [same(found.rows[0]), same(found.rows[2])]


@pytest.mark.parametrize(
    ("how", "told"),
    [({"ctx": 501}, "ctx 500, now 501"), ({"scored": 9}, "scored 8, now 9"), ({"seed": 1}, "seed 0, now 1")],
)
def test_other_settings_cannot_go_on(model, found, how, told):
    with pytest.raises(QuantizerConfigError, match=told):
        run(model, [KIVI], before=found, **how)


def test_another_model_text_or_version_cannot_go_on(model, found):
    with pytest.raises(QuantizerConfigError, match="model "):
        run(tiny.build("llama", seed=1), [KIVI], before=found)
    with pytest.raises(QuantizerConfigError, match="text "):
        compare(model, TOKENIZER, [KIVI], TEXT + "!", ctx=500, scored=8, before=found)
    with pytest.raises(QuantizerConfigError, match="mlx 0, now"):
        run(model, [KIVI], before=replace(found, versions={**found.versions, "mlx": "0"}))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"ctx": 613}, "has 620 tokens, but ctx=613 and 8 scored ones need 621"),
        ({"ctx": 0}, "ctx=0"),
        ({"scored": 1}, "scored=1"),
    ],
)
def test_a_text_that_is_too_short_is_refused(model, how, told):
    with pytest.raises(CacheInputError, match=told):
        run(model, [KIVI], **how)


def test_bars_reach_their_end_for_every_row(model):
    calls = []
    run(model, [KIVI, EXACT], progress=lambda *call: calls.append(call))
    for label in ("uncompressed", "kivi", "exact"):
        counts = [done for name, done, _ in calls if name == label]
        totals = {total for name, _, total in calls if name == label}
        assert counts == sorted(counts) and counts[0] == 0 and totals == {counts[-1]}


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3n", "qwen3_next", "mistral3"])
def test_layers_that_are_left_alone_count_in_bytes_and_not_in_bits(name):
    found = run(tiny.build(name), [KIVI], keys=())
    (row,) = found.rows
    assert row.error is None, row.error
    assert len(row.layer_error) == found.model.layers and all(error > 0 for error in row.layer_error)
    assert 4 < row.bits < 10 and row.ratio > 1
    assert found.model.parameters > 0 < found.model.head_dim


# ------------------------------------------------------------------------------------------------------- results


def test_json_and_back(found):
    assert Comparison.from_json(found.to_json()) == found
    told = json.loads(found.to_json())
    assert told["format"] == 1 and set(told["rows"][0]["bytes"]) == {"packed", "window", "index", "fixed"}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "rows": []}', "null", '{"format": 1, "x": 2}']
)
def test_what_is_no_result_is_refused(text, tmp_path):
    with pytest.raises(ArtifactDamagedError, match="Measure again"):
        Comparison.from_json(text)
    (tmp_path / "f").write_text(text)
    with pytest.raises(ArtifactDamagedError, match="f: these results"):
        Comparison.load(tmp_path / "f")
    with pytest.raises(ArtifactNotFoundError, match="compare --out"):
        Comparison.load(tmp_path / "g")


def test_csv_has_a_line_for_every_row(found):
    import csv
    import io

    lines = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert list(lines[0]) == list(COLUMNS) and [line["label"] for line in lines] == ["kivi", "bad", "exact"]
    assert float(lines[0]["mean_kl"]) == found.rows[0].mean_kl and json.loads(lines[0]["fields"]) == KIVI.fields
    assert int(lines[0]["bytes_packed"]) == found.rows[0].bytes["packed"]
    assert float(lines[0]["needle"]) == found.rows[0].needle.mean
    assert lines[1]["mean_kl"] == "" and lines[1]["error"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write(tmp_path / "a", "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write(tmp_path / "a", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_the_mean_of_needles_counts_all_alike():
    assert Needles((1, 2), (0.5,), ("a", "b"), (((1.0, 0.0),), ((1.0, 1.0),))).mean == 0.75


# --------------------------------------------------------------------------------------------------------- plans


def test_without_names_the_short_choice_and_with_all_every_row():
    assert [plan.label for plan in plans()] == list(SHORT)
    assert [plan.label for plan in plans(every=True)] == [label for label, _ in SHOWN]
    assert {plan.method for plan in plans(every=True)} == set(METHODS)


def test_a_family_has_its_methods_and_their_rows():
    tiered = families()["tiered"]
    assert {plan.method for plan in plans(of_families=["tiered"])} == set(tiered)
    assert {plan.family for plan in plans(of_families=["eviction"])} == {"eviction"}


def test_a_pair_has_the_settings_of_both():
    (plan,) = plans(["snapkv+kivi"])
    assert plan.label == "snapkv, 512 tokens + kivi, 4 bits" and plan.family == "eviction + group quantization"
    pair: Any = plan.config()
    first, second = pair
    assert (first.method, first.snap_budget, second.method, second.bit_width_inlier) == ("snapkv", 512, "kivi", 4)


def test_bits_add_rows_for_methods_that_have_a_width():
    chosen = plans(["kivi", "skvq", "snapkv", "nsnquant", "snapkv+kivi"], bits=[4, 3, 2])
    labels = [plan.label for plan in chosen]
    # 4 and 2 bits of kivi are rows already, and so are the 2 bits of skvq and nsnquant, which takes 1 and 2 only.
    assert labels[:2] == ["kivi, 4 bits", "kivi, 2 bits"] and labels.count("kivi, 3 bits") == 1
    assert "skvq, 4 bits" in labels and "snapkv, 4 bits" not in labels and "nsnquant, 4 bits" not in labels
    assert "kivi, 2 bits" in labels and labels.count("nsnquant, 2 bits") == 1 and "snapkv+kivi, 3 bits" in labels
    assert len(labels) == len(set(labels))
    skvq = next(plan for plan in chosen if plan.label == "skvq, 4 bits")
    assert skvq.fields == {"skvq_bits_key": 4, "skvq_bits_value": 4}
    assert next(plan for plan in plans(["kivi"], bits=[1]) if plan.label == "kivi, 1 bit")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"methods": ["kiwi"]}, "method='kiwi'.*one of turboquant_prod"),
        ({"methods": ["kivi", "snapkv+"]}, "method=''"),
        ({"methods": ["snapkv+kivi+h2o"]}, "two methods can be combined"),
        ({"of_families": ["fruit"]}, "family='fruit'.*eviction"),
        ({"methods": ["kivi"], "bits": [4, 7]}, "bits=7"),
        ({"methods": ["snapkv"], "bits": [4]}, "bits=4"),
    ],
)
def test_names_that_are_not_there_are_refused(how, told):
    with pytest.raises(QuantizerConfigError, match=told):
        plans(**how)


def test_a_plan_with_a_field_that_is_not_there_is_refused():
    with pytest.raises(QuantizerConfigError, match="kivi_bits=4.*kivi_group_size"):
        Plan("x", "kivi", {"kivi_bits": 4}).config()
    with pytest.raises(ArtifactNotFoundError, match="no calibration file nowhere"):
        Plan("x", "qfilters", {"store": "nowhere"}).config()
