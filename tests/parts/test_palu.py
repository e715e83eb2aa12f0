"""Palu: groups of heads, latents and their tiers, where a basis comes from, bytes, options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.formulas_palu import row_bytes
from tests.matrix import feed, identical, same_state, split, stored_bytes, tensors
from tests.models import tiny
from tests.models.running import decode, prefill, token_list
from tests.parts.test_kvtc import relative, rows
from veloxquant_mlx import (
    KVCacheBuilder,
    KVCacheConfig,
    KVCacheFactory,
    QuantizerConfigError,
    cache_report,
    load_cache,
    save_cache,
)
from veloxquant_mlx.artifacts import CalibrationArtifact
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.calibrate import fit_artifact
from veloxquant_mlx.codecs.headgroups import GroupLatents, HeadGroups, hadamard
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.models.projections import Linear, projections
from veloxquant_mlx.models.rope import Rotation, UnknownRotation, probe_rotation

FLOATS = {"palu_hi_bit": 16, "palu_lo_bit": 16}


def codec(groups: int = 2, bits: tuple[int, int] = (16, 16), **more: Any) -> GroupLatents:
    return GroupLatents(groups, bits, fit_rows=1, **more)


def fitted(one: GroupLatents, x: mx.array) -> GroupLatents:
    """Without the limit that a fit on few rows has."""
    return one.bind(one.arrange(one.learn(x)))


def correlated(shape: tuple[int, int, int, int], rank: int = 24) -> mx.array:
    """Heads that are mixtures of the same ``rank`` falling sources, and a little of their own."""
    b, h, n, dim = shape
    shared = rows((b, 1, n, rank), np.geomspace(4, 0.5, rank)) @ rows((1, h, rank, dim), seed=1) / rank**0.5
    return shared + 0.3 * rows(shape, np.geomspace(2, 0.05, dim), seed=2)


def cache(shape: tuple[int, int, int, int] = (1, 2, 64, 64), rope: Any = None, **fields: Any) -> CompressedKVCache:
    config = KVCacheConfig(method="palu", **fields)
    return CompressedKVCache(config, LayerInfo(head_dim=shape[2], value_dim=shape[3], kv_heads=shape[1], rope=rope))


def caches(model: Any, **fields: Any) -> list[Any]:
    return KVCacheBuilder.for_model(model, KVCacheConfig(**{"method": "palu", **fields}))


def notes(c: CompressedKVCache) -> str:
    return "\n".join(c.describe()["notes"])


# -------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("heads", "groups", "slots", "size"),
    [
        (8, 4, [0, 1, 2, 3, 4, 5, 6, 7], 2),
        (3, 4, [0, 1, 2], 1),
        (5, 3, [0, 1, 2, 3, 4, 5], 2),
        (3, 2, [0, 1, 2, 3], 2),
        (3, 1, [0, 1, 2], 3),
    ],
)
def test_groups(heads: int, groups: int, slots: list[int], size: int) -> None:
    """Neighbours; a missing head (numbered as one too many) is at the end of its group."""
    made = HeadGroups(heads, groups)
    assert (made.slots, made.size) == (slots, size)
    x = rows((2, heads, 7, 4))
    assert identical(made.apart(made.beside(x)), x) and identical(made.above(made.below(x)), x)
    assert made.beside(x).shape == (2, len(slots) // size, 7, 4 * size)


@pytest.mark.parametrize("n", [1, 2, 8, 24, 33, 40, 72, 96, 100, 192])
def test_hadamard_of_any_size(n: int) -> None:
    """Orthogonal; 100 = 64 + 32 + 4."""
    matrix = hadamard(n)
    assert np.allclose(matrix @ matrix.T, np.eye(n), atol=1e-6)  # float32 entries
    assert (matrix[:64, 64:] == 0).all() or n != 100


# ------------------------------------------------------------------------------------------------------------- latents


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 2), (3, 1), (2, 4)])
def test_full_rank_is_exact(heads: int, groups: int) -> None:
    """Up to float16 of the latents and of the basis, 2^-11 each, whose errors add up over the axes."""
    x = rows((2, heads, 300, 32), np.linspace(3, 0.1, 32))
    one = fitted(codec(groups, rank=32), x)
    more = rows((2, heads, 50, 32), seed=9)
    for y in (x, more):
        assert relative(one, y) < 4 * 2**-22 * 10
    assert one._basis is not None and one._basis.shape[3] == 32 * -(-heads // min(groups, heads))


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 2)])
@pytest.mark.parametrize("rank", [8, 20])
def test_error_is_the_tail_energy(heads: int, groups: int, rank: int) -> None:
    """Eckart-Young, per group of concatenated heads, to 1e-4."""
    x = correlated((1, heads, 500, 32))
    one = fitted(codec(groups, rank=rank), x)
    y, size = one.decode(one.encode(x)), -(-heads // groups)
    for part in np.array_split(np.arange(heads), groups):
        flat = np.array(x, np.float64)[0, part].swapaxes(0, 1).reshape(500, -1)
        tail = np.square(np.linalg.svd(flat, compute_uv=False))[size * rank :].sum()
        missed = np.square(np.array(y, np.float64)[0, part] - np.array(x, np.float64)[0, part]).sum()
        # an empty group's surplus axes: nothing is left but the rounding of float16
        assert missed == pytest.approx(tail, rel=1e-4, abs=1e-5 * np.square(flat).sum())


@pytest.mark.parametrize(
    ("dim", "bits"),
    [
        *((64, b) for b in ((16, 16), (4, 2), (8, 3), (5, 1), (16, 4), (6, 6))),
        *((d, (4, 2)) for d in (80, 96, 128, 256)),
    ],
)
@pytest.mark.parametrize(("heads", "offset"), [(2, False), (3, True)])
def test_products_are_those_of_decoded_rows(dim: int, bits: tuple[int, int], heads: int, offset: bool) -> None:
    """Scores on latents are scores on what keys decode to; sums of latents, expanded once, are those of values."""
    x = correlated((2, heads, 140, dim))
    one = codec(2, bits, rank=12, group=32)
    basis = one.arrange(one.learn(x))["basis"]
    one = one.bound(basis, rows((1, heads, 1, dim), seed=4) if offset else None)
    codes = one.encode(x)
    y, q = one.decode(codes), rows((2, heads, 5, dim), seed=5)
    p = mx.softmax(rows((2, heads, 5, 140), seed=6), axis=-1)
    assert mx.allclose(one.scores(q, codes), q @ y.swapaxes(-1, -2), rtol=1e-4, atol=2e-3)
    assert mx.allclose(one.mix(p, codes), p @ y, rtol=1e-3, atol=1e-3)
    assert mx.allclose(one.rows(codes, 70, 90), y[:, :, 70:90], rtol=1e-5, atol=1e-5)


def test_a_basis_of_all_heads_beats_bases_of_each() -> None:
    """At the same latents per token, on heads that have much in common."""
    x = correlated((1, 4, 800, 64))
    joint, apart = (relative(fitted(codec(groups, rank=8), x), x) for groups in (1, 4))
    assert joint < 0.75 * apart
    unlike = rows((1, 4, 800, 64), np.geomspace(4, 0.1, 64))  # and never loses where they have nothing in common
    joint, apart = (relative(fitted(codec(groups, rank=8), unlike), unlike) for groups in (1, 4))
    assert joint <= apart * 1.001


@pytest.mark.parametrize("energy", [0.3, 0.5, 0.9, 0.99, 1.0])
def test_rank_by_squared_energy(energy: float) -> None:
    """The largest that a group needs, in whole 32, below 32 in whole 8; never more than there are numbers."""
    x = mx.concatenate([correlated((1, 2, 600, 48)), 3 * rows((1, 2, 600, 48), np.geomspace(4, 0.1, 48))], axis=1)
    need = 0
    for part in (x[:, :2], x[:, 2:]):
        flat = np.array(part, np.float64)[0].swapaxes(0, 1).reshape(600, -1)
        power = np.square(np.linalg.svd(flat, compute_uv=False))
        need = max(need, int((np.cumsum(power) < energy * power.sum() * (1 - 1e-6)).sum()) + 1)
    want = min(-(-need // 8) * 8 if need <= 24 else -(-need // 32) * 32, 96)
    one = codec(energy=energy)
    basis = one.fit(x)["basis"]
    assert basis.shape == (1, 4, 48, want)
    # What is kept is that share, for every group: 1e-3 for float16
    y = one.bind({"basis": basis}).decode(one.bind({"basis": basis}).encode(x))
    for part in (slice(0, 2), slice(2, 4)):
        assert mx.square((y - x)[:, part]).sum() <= (1 - energy + 1e-3) * mx.square(x[:, part]).sum()


def test_equal_bits_are_one_width() -> None:
    """The paper's: one Hadamard matrix and one width over all latents, whatever the share."""
    x = correlated((1, 2, 300, 64))
    one, other, tiers = (
        fitted(codec(1, bits, rank=16, share=s), x) for bits, s in (((4, 4), 0.25), ((4, 4), 0.5), ((4, 3), 0.25))
    )
    assert same_codes(one.encode(x), other.encode(x))
    assert {n.partition("_")[0] for n in one.layout} == {"a"} and {n.partition("_")[0] for n in tiers.layout} == {
        "a",
        "b",
    }
    assert one._basis is not None
    latents = one._heads.beside(x) @ one._side_by_side()
    learned = one.learn(x)["axes"][..., :32]
    turned = one._heads.beside(x) @ one._heads.fill(learned).reshape(1, 1, 128, 32) @ mx.array(hadamard(32))
    assert mx.allclose(latents, turned, atol=2e-2)  # float16 axes against float32 ones


def same_codes(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(identical(a[name], b[name]) for name in a)


def test_leading_latents_get_the_bits() -> None:
    """Each tier is half a step off at most, with steps of its own: more bits for the others would be wasted."""
    x = correlated((1, 2, 400, 64))
    errors = {bits: relative(fitted(codec(1, bits, rank=32), x), x) for bits in ((4, 2), (2, 2), (8, 4), (16, 16))}
    assert errors[16, 16] < errors[8, 4] < errors[4, 2] < errors[2, 2]
    one = fitted(codec(1, (4, 2), rank=32, group=16), x)
    z = one._heads.beside(x) @ one._side_by_side()
    found = mx.concatenate([tier.decode(own) for tier, own in one._of(one.encode(x))], axis=-1)
    for part, bits in ((slice(0, 16), 4), (slice(16, 64), 2)):
        groups = z[..., part].reshape(1, 1, 400, -1, 16)
        step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / (2**bits - 1)
        off = mx.abs(found[..., part].reshape(groups.shape) - groups)
        assert mx.all(off <= step / 2 + 2**-9 * mx.abs(groups).max())  # float16 ends of the range


def test_share_may_be_all_or_nothing() -> None:
    x = correlated((1, 2, 200, 32))
    for share, bits in ((0.0, 2), (1.0, 4)):
        one, plain = fitted(codec(1, (4, 2), rank=8, share=share), x), fitted(codec(1, (bits, bits), rank=8), x)
        assert same_codes(one.encode(x), plain.encode(x))


def test_few_rows_make_few_latents() -> None:
    """More than four rows for each: a basis of a sequence's own must save more than it costs."""
    x = correlated((1, 2, 100, 64))
    assert codec(1, rank=32).fit(x)["basis"].shape[3] == 24
    assert codec(1, rank=3).fit(x[:, :, :25])["basis"].shape[3] == 6
    assert codec(1, rank=32).fit(x[:, :, :3])["basis"].shape[3] == 8


def test_sequences_have_bases_of_their_own() -> None:
    """Two sequences in one cache: each as by itself."""
    x = mx.concatenate([correlated((1, 2, 300, 32)), rows((1, 2, 300, 32), np.geomspace(0.1, 4, 32))])
    both = fitted(codec(1, (8, 4), rank=8), x)
    for i in range(2):
        alone = fitted(codec(1, (8, 4), rank=8), x[i : i + 1])
        assert mx.allclose(both.decode(both.encode(x))[i], alone.decode(alone.encode(x[i : i + 1]))[0], atol=1e-2)


# --------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({}, 1.75),  # (r / D) (average bits + 32 / g): two tiers of whole groups of 32
        ({"palu_group_size": 128}, 1.5),  # a pair of numbers for each tier
        ({"palu_group_size": 128, "palu_hi_bit": 2, "palu_lo_bit": 2}, 1.125),  # one for all 128
        (FLOATS, 8.0),
        ({"palu_hi_fraction": 0.5}, 2.0),
    ],
)
def test_storage_at_128(fields: dict[str, Any], bits: float) -> None:
    """Four groups of two heads, 64 latents per head: bits per number, to the byte, beside the basis of 16 r / T."""
    shape, tokens = (1, 8, 128, 128), 4096
    c = cache(shape, palu_rank=64, **fields)
    data = tensors(tokens, shape, repeats=1, dtype=mx.float16)
    c.append(data.k, data.v)
    c.end_prefill()
    numbers = tokens * 8 * 128
    basis = sum(s.arrays()["fitted.basis"].nbytes for s in (c.store.keys, c.store.values))
    assert basis * 8 == 2 * numbers * 16 * 128 / tokens
    assert (stored_bytes(c) - basis) * 8 == 2 * numbers * bits


@pytest.mark.parametrize(
    ("dim", "rank", "fields"),
    [(64, 20, {"palu_hi_bit": 5, "palu_lo_bit": 3}), (80, 33, FLOATS), *((d, 8, {}) for d in (80, 96, 128, 256))],
)
def test_storage_of_other_sizes(dim: int, rank: int, fields: dict[str, Any]) -> None:
    """Whole bytes and groups in use alone; three heads in two groups share the larger group's number."""
    shape = (1, 3, dim, dim)
    c = cache(shape, palu_rank=rank, palu_n_head_groups=2, n_calib_tokens=300, **fields)
    data = tensors(320, shape, repeats=1, dtype=mx.float16)
    c.append(data.k, data.v)
    c.settle()
    bits = (fields.get("palu_hi_bit", 4), fields.get("palu_lo_bit", 2))
    assert stored_bytes(c) == 2 * (2 * 320 * row_bytes(2 * rank, bits) + 2 * 3 * dim * 2 * rank)


def test_values_may_stay_floats() -> None:
    c = cache(palu_rank=16, palu_quantize_values=False)
    feed(c, tensors(192), [191, 1])
    assert set(c.store.values.arrays()) == {"a_rows", "fitted.basis"}
    assert c.store.values.arrays()["a_rows"].dtype == mx.float16 and "a_words" in c.store.keys.arrays()
    packed = cache(palu_rank=16)
    feed(packed, tensors(192), [191, 1])
    assert stored_bytes(c) - stored_bytes(packed) == 2 * 192 * (32 - row_bytes(16))


# -------------------------------------------------------------------------------------------------- origin of a basis


def test_prompt() -> None:
    """Without a model: fitted when the prompt ends, before RoPE, once there are enough tokens, however it came."""
    rope, data = probe_rotation(nn.RoPE(64), 64), tensors(301)
    whole, pieces, first, short = (cache(rope=rope, palu_rank=16, n_calib_tokens=n) for n in (None, None, 80, None))
    feed(whole, data, [300, 1])
    feed(pieces, data, [*split(300, 77), 1])
    feed(first, data, [300, 1])
    feed(short, data.part(0, 64), [63, 1])
    assert same_state(whole, pieces) and not same_state(whole, first)
    assert short.store.keys.n_sealed == 0 and "once there are 65 tokens" in notes(short)
    feed(short, data.part(64, 65), [1])
    assert short.store.keys.n_sealed == 64 and short.store.keys.tail.n == 1
    assert "keys: basis_source: the first 80 tokens" in notes(first)
    keys = rope.turn(data.k, -mx.arange(301)[None, None])
    want = codec(4, (4, 2), rank=16).fit(keys)["basis"]
    assert mx.allclose(whole.store.keys.arrays()["fitted.basis"], want, atol=2e-3)
    # what is fitted is not undone by trimming, and rows that stay are the rows they were
    assert first.trim(149) == 149  # to whole groups of 8, as rows that are packed stay packed
    again = cache(rope=rope, palu_rank=16, n_calib_tokens=80)
    feed(again, data.part(0, 152), [152])
    assert same_state(first, again)


def test_without_a_model() -> None:
    """The number of heads shows with the first rows; what stays after others were dropped makes fewer latents."""
    config = KVCacheConfig(method="palu", palu_rank=16, palu_n_head_groups=1)
    c = CompressedKVCache(config, LayerInfo(64, 64))
    feed(c, tensors(129), [128, 1])
    assert c.store.keys.arrays()["fitted.basis"].shape == (1, 2, 64, 32)
    assert "once there are 129 tokens (no model is at hand)" in notes(c)
    few = CompressedKVCache(KVCacheConfig(method="knorm", knorm_budget=70), LayerInfo(64, 64), config)
    feed(few, tensors(129), [128, 1])
    assert few.store.keys.arrays()["fitted.basis"].shape == (1, 2, 64, 16)


def rows_of_a_text(model: Any, count: int) -> tuple[list[mx.array], list[mx.array]]:
    """Keys after RoPE and values of every layer."""
    stock = KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi", residual_length=1 << 15))
    model(tiny.tokens(count), cache=stock)
    ours = [c.materialize() for c in stock if isinstance(c, CompressedKVCache)]
    return [k for k, _ in ours], [v for _, v in ours]


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "llama_yarn", "smollm3", "cohere2"])
def test_weights(name: str) -> None:
    """Axes of ``W_g W_g^T``, of whatever modules; at full rank any key and value of the model is exact."""
    model = tiny.build(name)
    made = caches(model, palu_energy_threshold=1.0, **FLOATS)
    prefill(model, made, tiny.tokens(80), 50)
    keys, values = rows_of_a_text(model, 80)
    ours = [c for c in made if isinstance(c, CompressedKVCache)]
    for c, k, v in zip(ours, keys, values, strict=True):
        assert "keys: 16 latents for 16 numbers; basis_source: weights" in notes(c)
        assert c.store.keys.n_sealed == c.store.values.n_sealed == 80
        for got, want in zip(c.materialize(), (k, v), strict=True):
            assert mx.linalg.norm(got - want) < 5e-3 * mx.linalg.norm(want)  # float16 of basis and latents


def test_weights_of_a_rank() -> None:
    """The span is that of the leading left singular vectors of the group's projection."""
    model = tiny.build("llama")
    made = caches(model, palu_rank=4, palu_n_head_groups=1)
    w = np.array(model.layers[1].self_attn.k_proj.weight, np.float64)
    u = np.linalg.svd(w)[0][:, :8]
    basis = np.array(made[1].layer.derived["k_basis"], np.float64)[0].reshape(32, 8)
    assert np.allclose(basis @ basis.T, u @ u.T, atol=5e-3)  # float16


def test_weights_that_are_quantised_or_biased() -> None:
    """Looked at through the layer itself: packed weights count as they act, and a bias is taken out and put back."""
    plain, packed, biased = (tiny.build("llama") for _ in range(3))
    nn.quantize(packed, group_size=32, bits=8)
    for layer in biased.layers:
        layer.self_attn.v_proj.bias = mx.array(rows((1, 1, 1, 32), 50.0)[0, 0, 0])
        layer.self_attn.k_proj.bias = mx.array(rows((1, 1, 1, 32), 0.5, seed=2)[0, 0, 0])
    fields = {"palu_rank": 8, "palu_n_head_groups": 1, **FLOATS}
    bases = [caches(m, **fields)[0].layer.derived for m in (plain, packed, biased)]
    spans = [np.array(b["v_basis"], np.float64)[0].reshape(32, 16) for b in bases]
    spans = [s @ s.T for s in spans]
    assert np.abs(spans[0] - spans[1]).max() < 0.1  # 8-bit weights are nearly the same
    assert np.allclose(spans[0], spans[2], atol=5e-3)  # the bias is not in the span
    offset = bases[2]["v_offset"]
    assert mx.allclose(offset.reshape(-1), biased.layers[0].self_attn.v_proj.bias, rtol=1e-5)
    assert "v_offset" not in bases[0]
    made = caches(biased, **fields)
    prefill(biased, made, tiny.tokens(60), 60)
    keys, values = rows_of_a_text(biased, 60)
    for c, k, v in zip(made, keys, values, strict=True):
        got_k, got_v = c.materialize()
        assert mx.linalg.norm(got_v - v) < 0.05 * mx.linalg.norm(v)  # a bias lost would be nearly all of it
        assert mx.linalg.norm(got_k - k) < mx.linalg.norm(k)


def test_large_key_biases_are_taken_out_once() -> None:
    """``models.bias`` takes them out of rows before any codec sees them."""
    model = tiny.build("qwen2")
    for layer in model.layers:
        layer.self_attn.k_proj.bias = layer.self_attn.k_proj.bias + 40.0
    made = caches(model, palu_energy_threshold=1.0, **FLOATS)
    assert made[0].layer.key_bias is not None and "k_offset" not in made[0].layer.derived
    prefill(model, made, tiny.tokens(60), 60)
    for c, k in zip(made, rows_of_a_text(model, 60)[0], strict=True):
        assert mx.linalg.norm(c.materialize()[0] - k) < 2e-3 * mx.linalg.norm(k)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_normed_keys_have_no_weights(name: str) -> None:
    """Values are linear in the hidden state, keys are not: those wait for the prompt, before RoPE."""
    model = tiny.build(name)
    made = [c for c in caches(model, palu_rank=8) if isinstance(c, CompressedKVCache)]
    for c in made:
        assert "keys: basis_source: the prompt when it ends, once there are 33 tokens (keys are not linear" in notes(c)
        assert "values: 8 latents for 32 numbers; basis_source: weights" in notes(c)
    whole = caches(model, palu_rank=8)
    prefill(model, whole, tiny.tokens(60), 25)
    assert all(c.store.keys.n_sealed == 56 for c in whole if isinstance(c, CompressedKVCache))


class Odd(nn.Module):
    """Attention that no weights explain: it raises, or hides its projections."""

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        raise ValueError("no")


def test_projections_that_cannot_be_seen() -> None:
    for attention, width in ((Odd(), 8), (object(), 8), (Odd(), None)):
        found = projections(attention, width)
        assert all(isinstance(told, str) for told in found)
    told = projections(Odd(), 8)[0]
    assert isinstance(told, str) and "ValueError: no" in told
    keys, values = projections(tiny.build("llama").layers[0].self_attn, 64)
    assert isinstance(keys, Linear) and isinstance(values, Linear) and keys.offset is None


def test_keys_that_turn_in_an_unknown_way() -> None:
    """They are stored after their positions, where weights say nothing."""
    model = tiny.build("llama_dynamic")
    made = caches(model, palu_rank=4)
    assert isinstance(made[0].layer.rope, UnknownRotation)
    assert "(weights give keys before their positions)" in notes(made[0]) and "values: 4 latents" in notes(made[0])


def test_artifact(tmp_path: Path) -> None:
    """The Gram matrix of a text: as a fit on its rows would have it; comes before weights; shared by all caches."""
    model = tiny.build("qwen2")
    made, remarks = fit_artifact(model, [token_list(300)], "palu")
    assert "latents hold 90 % of the keys" in remarks[0]
    made.save(tmp_path / "axes")
    artifact = CalibrationArtifact.load(tmp_path / "axes")
    fields = {"palu_rank": 8, "store": artifact}
    ours, again = caches(model, **fields), caches(model, **fields)
    assert "values: 8 latents for 16 numbers; basis_source: calibration artifact" in notes(ours[0])
    keys, values = rows_of_a_text(model, 300)
    rope = ours[1].layer.rope
    assert isinstance(rope, Rotation)
    keys = rope.turn(keys[1], -mx.arange(300)[None, None])
    for part, x in (("keys", keys), ("values", values[1])):
        basis = getattr(ours[1]._recipe, part).codec._basis
        assert mx.allclose(basis, codec(4, (4, 2), rank=8).fit(x)["basis"], atol=5e-3)
        assert basis is getattr(again[1]._recipe, part).codec._basis
    report = cache_report([ours[1], again[1]])
    assert report.layers[1].fixed == 0 < report.layers[0].fixed
    assert ours[0].unsaved() == ["store"]
    with pytest.raises(QuantizerConfigError, match="palu_n_head_groups=1 .* must be 2"):
        caches(model, **fields, palu_n_head_groups=1)


# ---------------------------------------------------------------------------------------------------- shared and saved


def test_weights_are_shared_and_saved(tmp_path: Path) -> None:
    """One basis per layer for all sequences, counted once; a file has it too, and needs no model to be read."""
    model = tiny.build("qwen2")
    a, b = caches(model, palu_rank=8), caches(model, palu_rank=8)
    for one, other in zip(a, b, strict=True):
        assert all(one.layer.derived[n] is other.layer.derived[n] for n in ("k_basis", "v_basis", "v_offset"))
    prefill(model, a, tiny.tokens(70), 40)
    report = cache_report([a[0], b[0]])
    basis = 2 * 2 * 16 * 8 * 2
    assert report.layers[0].fixed >= basis and report.layers[1].fixed == 0
    assert caches(model, palu_rank=4)[0].layer.derived["k_basis"].shape == (1, 2, 16, 4)
    save_cache(tmp_path / "file", a, model)
    loaded = load_cache(tmp_path / "file", model)
    for one, other in zip(a, loaded, strict=True):
        assert same_state(one, other) and one.nbytes == other.nbytes and notes(one) == notes(other)
    more, again = (decode(model, c, tiny.tokens(5, seed=3)) for c in (a, loaded))
    assert np.array_equal(more, again)


def test_weights_that_change() -> None:
    """Bases follow the weights of a model that is tuned, fused or loaded anew; unchanged weights share theirs."""
    model, other = tiny.build("llama"), tiny.build("llama", seed=9)
    first, again = caches(model, **FLOATS), caches(model, **FLOATS)
    model.update(other.parameters())
    now, want = caches(model, **FLOATS), caches(other, **FLOATS)
    for old, same, cache, fresh in zip(first, again, now, want, strict=True):
        for name, basis in cache.layer.derived.items():
            assert old.layer.derived[name] is same.layer.derived[name]
            assert identical(basis, fresh.layer.derived[name]) and not identical(basis, old.layer.derived[name])


def test_fixed_tokens_beat_weights() -> None:
    """``n_calib_tokens`` asks for a basis of the sequence's own."""
    made = caches(tiny.build("llama"), n_calib_tokens=64, palu_rank=8)
    assert not made[0].layer.derived and "keys: basis_source: the first 64 tokens" in notes(made[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"palu_hi_bit": 7}, "palu_hi_bit=7"),
        ({"palu_lo_bit": 16}, "<= palu_hi_bit = 4"),
        ({"palu_rank": 129}, "<= head_dim = 128"),
        ({"palu_rank": 0}, "palu_rank=0"),
        ({"palu_n_head_groups": 0}, "palu_n_head_groups=0"),
        ({"palu_energy_threshold": 0.0}, "palu_energy_threshold=0.0"),
        ({"palu_hi_fraction": 1.5}, "palu_hi_fraction=1.5"),
        ({"palu_group_size": 1}, "palu_group_size=1"),
        ({"n_calib_tokens": 32}, "an int >= 33"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizerConfigError, match=message):
        KVCacheFactory.create(KVCacheConfig(method="palu", **fields))
