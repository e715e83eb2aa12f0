"""Recommendations: bytes against real receipts, the rules of choice, and what is said of what was not measured."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, cache_report
from veloxquant_mlx.core.exceptions import ArtifactNotFoundError, CacheInputError, QuantizerConfigError
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.quality import Comparison, Needles, Plan, Row, compare
from veloxquant_mlx.quality.held import Scale, measured_layers, stretched
from veloxquant_mlx.quality.recommend import Advice, recommend, tables
from veloxquant_mlx.quality.results import Model, Text, Uncompressed
from veloxquant_mlx.quality.shape import Own, Shape, read_shape

TOKENIZER = SimpleNamespace(encode=lambda text: [ord(c) for c in text], bos_token_id=None, chat_template=None)
TEXT = "".join(chr(32 + t % 90) for t in tiny.tokens(520)[0].tolist())  # type: ignore[union-attr]
PLANS = [
    Plan("kivi", "kivi", {"residual_length": 32}),
    Plan("rvq", "turboquant_rvq", {"bit_width_inlier": 2}),
    Plan("gear", "gear", {}),
    Plan("nsn", "nsnquant", {}),
    Plan("snap", "snapkv", {"snap_budget": 128}),
    Plan("h2o", "h2o", {"h2o_budget": 128}),
    Plan("stream", "streaming_llm", {"stream_window_size": 128}),
    Plan("both", "snapkv+kivi", {"snap_budget": 256, "residual_length": 32}),
]


def folder(where: Path, name: str) -> Path:
    """A configuration alone: weights are not needed."""
    module, arguments = tiny.CONFIGS[name]
    (where / "config.json").write_text(json.dumps({"model_type": module, **arguments}), encoding="utf-8")
    return where


# ------------------------------------------------------------------------------------------------------------- bytes


@pytest.fixture(scope="module")
def measured() -> Comparison:
    return compare(tiny.build("mistral"), TOKENIZER, PLANS, TEXT, ctx=500, scored=8, keys=())


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_bytes_are_those_of_a_receipt(measured, name, tmp_path):
    """Heads of 32 numbers as measured, more than twice the tokens, 32-bit keys, sliding layers in one model.

    Buffers grow in steps of 64 rows, by which the measured 507 tokens differ from what is asked: 5 %.
    """
    tokens, model = 1200, tiny.build(name)
    shape = replace(read_shape(folder(tmp_path, name)), itemsize=4)
    for plan, row in zip(PLANS, measured.rows, strict=True):
        longer = stretched(plan, measured.ctx, tokens)
        caches = KVCacheBuilder.for_model(model, longer.config())
        ids = tiny.tokens(tokens)
        for start in range(0, tokens - 1, 512):
            model(ids[:, start : min(start + 512, tokens - 1)], cache=caches)
            mx.eval([cache.state for cache in caches])
        model(ids[:, -1:], cache=caches)
        mx.eval([cache.state for cache in caches])
        found = Scale(measured, row)(shape, tokens)
        assert found.bytes == pytest.approx(cache_report(caches).nbytes, rel=0.05), plan.label


def test_bytes_of_the_uncompressed_cache(tmp_path):
    """After 257 tokens, the last one alone: full layers hold them all, in buffers of 512, sliding ones the newest 8."""
    model, ids = tiny.build("gemma3_text"), tiny.tokens(257)
    own = replace(read_shape(folder(tmp_path, "gemma3_text")), itemsize=4)
    caches = make_prompt_cache(model)
    model(ids[:, :-1], cache=caches)
    model(ids[:, -1:], cache=caches)
    rows = [cache.offset if isinstance(cache, KVCache) else cache.max_size for cache in caches]
    assert own.uncompressed(257) == sum(
        4 * n * cache.keys.size // cache.keys.shape[2] * 2 for n, cache in zip(rows, caches, strict=True)
    )
    assert own.uncompressed(5) == 5 * own.uncompressed(1)


def test_a_method_that_waits_for_the_end_of_the_prompt_needs_room_for_it(measured, tmp_path):
    shape = read_shape(folder(tmp_path, "mistral"))
    peaks = {row.label: Scale(measured, row)(shape, 4000) for row in measured.rows}
    for label in ("gear", "snap", "h2o", "both"):
        assert peaks[label].peak == shape.uncompressed(4000)
    for label in ("kivi", "rvq", "stream"):
        assert peaks[label].peak == peaks[label].bytes < shape.uncompressed(4000)


def test_a_share_of_tokens_is_kept_at_a_longer_context():
    assert stretched(PLANS[4], 500, 2000).fields == {"snap_budget": 512}
    assert stretched(Plan("h2o", "h2o"), 1024, 4096).fields == {"h2o_budget": 2048}  # the default, 512, too
    assert stretched(PLANS[7], 500, 1000).fields == {"snap_budget": 512, "residual_length": 32}
    assert stretched(Plan("kvtc", "kvtc", {"kvtc_bit_budget": 256}), 500, 1000).fields == {"kvtc_bit_budget": 256}
    assert stretched(PLANS[4], 500, 100) == PLANS[4]


# ------------------------------------------------------------------------------------------------------------ shapes


def test_a_shape_is_read_without_weights(tmp_path):
    shape = read_shape(folder(tmp_path, "gemma3_text"), "some")
    assert (shape.name, shape.head_dim, shape.kv_heads, len(shape.layers)) == ("some", 32, 2, 2)
    assert shape.own == (Own(8, 2 * 64),) * 2 and shape.itemsize == 2
    assert shape.weights == 2 * shape.parameters and "no weights in the folder" in shape.notes[0]
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1234}}')
    assert read_shape(tmp_path).weights == 1234


def test_a_shape_of_weights_is_that_of_the_model(tmp_path):
    from tests.serve.served import make_folder

    shape = read_shape(make_folder(tmp_path, "qwen3"))
    model = tiny.build("qwen3")
    assert shape.itemsize == 4 and shape.weights == 4 * shape.parameters and not shape.notes
    assert len(shape.layers) == len(model.layers) and shape.most == 256


def test_what_is_not_counted_is_said(tmp_path):
    shape = read_shape(folder(tmp_path, "jamba"))
    assert len(shape.layers) == 1 and "not counted: layers with recurrent state" in shape.notes
    with pytest.raises(QuantizerConfigError, match="no layer can be compressed.*latent attention"):
        recommend(read_shape(folder(tmp_path, "deepseek_v3")), [TABLE], 10**9, 100)


@pytest.mark.parametrize("text", [None, "{", '{"model_type": "unheard of"}'])
def test_a_folder_without_a_model_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArtifactNotFoundError, match="cannot be read"):
        read_shape(tmp_path)


# ------------------------------------------------------------------------------------------------------------- rules

LAYERS, HEADS, DIM = 2, 2, 64
NUMBERS = (1024 + 63) * 2 * LAYERS * HEADS * DIM


def needles(score: float) -> Needles:
    return Needles((1024,), (0.5,), ("word",), (((score,),),))


def row(label: str, method: str, kl: float | None, found: float = 0.8, speed: float = 0.5, **fields: Any) -> Row:
    """A row of bytes that every method could have held."""
    packed = NUMBERS // 2
    return Row(
        label,
        method,
        "f",
        fields,
        error="RuntimeError: no" if kl is None else None,
        bytes={"packed": packed, "window": 0, "index": 0, "fixed": 0},
        bytes_16=2 * NUMBERS,
        bits=8 * packed / NUMBERS,
        ratio=4.0,
        mean_kl=kl,
        needle=needles(found),
        decode_speed=speed,
    )


def table(*rows: Row, name: str = "small", parameters: int = 1000) -> Comparison:
    model, text = Model(name, "f", LAYERS, HEADS, DIM, parameters), Text("built-in", "s", 1500)
    return Comparison(model, text, 1024, 64, 0, {}, "CPU", Uncompressed(9.0, needles(0.8)), rows)


def shape(parameters: int = 1000, dim: int = DIM, **changes: Any) -> Shape:
    layers = tuple(LayerInfo(dim, dim, HEADS, index=i, rank=i, n_layers=LAYERS) for i in range(LAYERS))
    return replace(Shape("mine", layers, (), parameters, 10**6), **changes)


RVQ2 = row("rvq, 2", "turboquant_rvq", 0.02, bit_width_inlier=2)
RVQ1 = row("rvq, 1", "turboquant_rvq", 0.5, bit_width_inlier=1)
TABLE = table(RVQ2, RVQ1)
ROOM = 10**6 + 400_000  # 4 bits of 1,024 tokens are 262,144 bytes, 16 bits four times that


def ask(*rows: Row, memory: int = ROOM, context: int = 1024, **how: Any) -> Advice:
    return recommend(shape(), [table(*rows)], memory, context, **how)


def test_the_smallest_kl_that_fits_is_chosen():
    advice = ask(row("a", "turboquant_rvq", 0.02), row("b", "turboquant_mse", 0.01), RVQ1)
    assert advice.best is not None and advice.best.label == "b" and not advice.best.against
    assert advice.best.held == pytest.approx(NUMBERS // 2 * 1024 / 1088, rel=0.01)  # buffers of 1,088 tokens
    assert not advice.uncompressed_fits and advice.uncompressed == 2 * 1024 * 2 * LAYERS * HEADS * DIM
    assert advice.room == 400_000 and [c.label for c in advice.others] == ["a", "rvq, 1"]
    assert not advice.extrapolates
    assert isinstance(advice.best.plan.config(), KVCacheConfig)


def test_speed_decides_between_those_that_are_as_good():
    rows = [row("a", "turboquant_rvq", 0.010), row("b", "turboquant_mse", 0.014, speed=0.9)]
    advice = ask(*rows, row("c", "polar", 0.016, speed=1.0))
    assert advice.best is not None and advice.best.label == "b" and "fastest" in advice.why
    assert [c.label for c in advice.others] == ["a", "c"]


def test_what_lost_too_much_is_the_last_choice_and_that_is_said():
    advice = ask(RVQ1, row("b", "turboquant_mse", 0.01, found=0.6))
    assert advice.best is not None and advice.best.label == "b"
    assert advice.best.against == ("needles 75% below 90%",)
    assert "nothing that fits is good enough" in advice.why
    assert advice.others[0].against == ("KL 0.500 above 0.1",)
    best = ask(RVQ1, max_kl=0.6).best
    assert best is not None and not best.against
    best = ask(row("b", "turboquant_mse", 0.01, found=0.6), min_needle=0.7).best
    assert best is not None and not best.against


def test_the_worst_of_several_models_decides_and_the_band_has_both():
    other = table(row("x", "turboquant_rvq", 0.07, bit_width_inlier=2), name="other", parameters=3000)
    advice = recommend(shape(2000), [TABLE, other], ROOM, 1024)
    assert advice.best is not None and advice.best.kl == (0.02, 0.07)
    assert [e.model for e in advice.best.evidence] == ["small", "other"]
    failed = table(row("x", "turboquant_rvq", None, bit_width_inlier=2), name="other", parameters=3000)
    best = recommend(shape(2000), [TABLE, failed], ROOM, 1024).best
    assert best is not None and best.against == ("failed on other",)


def test_rows_of_the_model_itself_are_the_only_ones_that_count():
    other = table(row("x", "turboquant_rvq", 0.07, bit_width_inlier=2), name="other", parameters=3000)
    advice = recommend(shape(), [other, TABLE], ROOM, 1024)
    assert advice.best is not None and advice.best.kl == (0.02, 0.02) and not advice.extrapolates


def test_rows_that_saved_nothing_are_no_evidence():
    idle = replace(row("idle", "minicache", 1e-7), bits=16.0)
    advice = ask(idle, row("gone", "kivi", None), RVQ2)
    assert set(advice.left_out) == {"idle", "gone"} and advice.left_out["gone"] == "failed on small"
    assert "no evidence" in advice.left_out["idle"]


def test_a_setting_that_the_model_cannot_have_is_left_out():
    outliers = row("q", "qjl", 0.01, jl_dim=32, n_outlier_channels=40)
    assert not recommend(shape(2000, 64), [table(RVQ2, outliers)], ROOM, 1024).left_out
    advice = recommend(shape(2000, 32), [table(RVQ2, outliers)], ROOM, 1024)
    assert "n_outlier_channels=40 cannot be used" in advice.left_out["q"]


def test_where_nothing_fits_it_says_what_would():
    advice = ask(RVQ2, RVQ1, context=8192)
    assert advice.best is None and advice.smallest is not None and advice.smallest.label == "rvq, 2"
    # 256 bytes a token and buffers in steps of 64 tokens: what fits into 400,000 bytes.
    assert 1400 < advice.smallest_context < 1600
    assert recommend(shape(), [TABLE], ROOM, advice.smallest_context).best is not None
    assert recommend(shape(), [TABLE], ROOM, advice.smallest_context + 1).best is None
    none = ask(RVQ2, memory=10**5)
    assert none.best is None and none.room < 0 and none.smallest_context == none.uncompressed_context == 0


def test_an_uncompressed_cache_that_fits_is_told():
    advice = ask(RVQ2, memory=10**8)
    assert advice.uncompressed_fits and advice.best is not None
    assert shape().uncompressed(advice.uncompressed_context) <= advice.room
    assert shape().uncompressed(advice.uncompressed_context + 1) > advice.room


def test_what_was_not_measured_is_said():
    advice = recommend(shape(5000, 128, most=2048), [TABLE], 10**9, 4096)
    kinds = [text.split(":")[0] for text in advice.extrapolates]
    assert kinds == [
        "another model",
        "a larger model",
        "other heads",
        "a longer context",
        "beyond the 2,048 tokens that the model was made for",
    ]
    assert "5.0 times" in advice.extrapolates[1] and "small (0M parameters)" in advice.extrapolates[0]


def test_a_longer_context_stretches_what_drops_and_refuses_what_grows_coarser():
    snap = row("snapkv, 512 tokens", "snapkv", 0.01, snap_budget=512)
    tiers = row("tiers", "age_tiered", 0.001)
    advice = recommend(shape(), [table(snap, tiers)], 10**9, 4096)
    assert advice.best is not None and advice.best.fields == {"snap_budget": 2048}
    assert advice.best.label == "snapkv, snap_budget=2048" and "keeps the share" in advice.best.notes[0]
    assert advice.best.peak == advice.uncompressed
    assert "old tokens coarser" in advice.others[0].against[0]
    assert not ask(tiers).others and ask(tiers).best is not None


@pytest.mark.parametrize("how", [{"memory": 0}, {"context": 0}])
def test_numbers_that_cannot_be_used_are_refused(how):
    with pytest.raises(CacheInputError, match="must be at least 1"):
        ask(RVQ2, **how)


def test_without_tables_there_is_nothing_to_say():
    with pytest.raises(CacheInputError, match="at least one comparison"):
        recommend(shape(), [], ROOM, 1024)


def test_json_has_everything():
    told = json.loads(ask(RVQ2).to_json())
    assert told["best"]["method"] == "turboquant_rvq" and told["best"]["evidence"][0]["text"] == "built-in"
    assert told["room"] == 400_000 and told["uncompressed_fits"] is False


# ------------------------------------------------------------------------------------------------------------ tables


def test_the_tables_ship_and_cover_every_method():
    from veloxquant_mlx.cache.registry import METHODS

    shipped = tables()
    assert {found.model.head_dim for found in shipped} == {64, 256}
    for found in shipped:
        assert {row.method for row in found.rows} >= set(METHODS) and found.ctx == 1024


def test_the_tables_tell_the_bytes_of_each_other():
    """Heads of 64 and of 256, 30 layers and 3: what docs/recommend.md says of it."""
    off = []
    for there, here in (tables(), tables()[::-1]):
        model = here.model
        alike = Shape("x", tuple(measured_layers(here)), (), model.parameters, 0)
        then = {row.label: row for row in there.rows}
        for found in here.rows:
            assert found.bits is not None
            # Of the compressed layers alone, and of all tokens that were fed: a row's own share of the 16-bit bytes.
            tokens = here.ctx + here.scored - 1
            expected = found.bits / 16 * alike.uncompressed(tokens)
            off.append(abs(Scale(there, then[found.label])(alike, tokens).bytes / expected - 1))
    assert statistics.median(off) < 0.05 and max(off) < 1.2
