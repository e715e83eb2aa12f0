"""xKV: latents that layers share, bases of the sequence, blocks that the bases miss."""

from __future__ import annotations

from math import ceil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.joint import group, layers, run
from tests.matrix import Tensors, feed, identical, same_state, split, tensors
from tests.models import tiny
from tests.parts.test_kvtc import rows
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.attention import reference
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.codecs import basis
from veloxquant_mlx.codecs.basis import leading_axes
from veloxquant_mlx.codecs.crosslayer import SharedLatents
from veloxquant_mlx.codecs.joint import JointRows
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.models.rope import probe_rotation

RANK, NOISE = 24, 0.3
HALF = 2.0**-11  # half a step of float16


def planted(members: int = 3, noise: float = NOISE, tokens: int = 1024, batch: int = 1, seed: int = 0) -> mx.array:
    """Layers of 2 heads of 64 that share 24 numbers per token, and noise of their own: ``(B, 2 G, T, 64)``."""
    rng = np.random.default_rng(seed)
    shared, maps = rng.normal(size=(batch, tokens, RANK)), rng.normal(size=(batch, RANK, members * 128))
    x = shared @ maps + noise * rng.normal(size=(batch, tokens, members * 128))
    return mx.array(x.reshape(batch, tokens, 2 * members, 64).swapaxes(1, 2).astype(np.float32))


def codecs(x: mx.array, members: int, rank: int | None = RANK, bits: int = 16, **fields: Any) -> list[Any]:
    """The codec of every layer of a group, fitted on ``x``."""
    made = [
        SharedLatents(bits, 32, rank=rank, members=members, member=j, **{"energy": 0.95, **fields})
        for j in range(members)
    ]
    fitted = made[0].fit(x)
    return [one.bind(fitted) for one in made]


def decoded(made: list[Any], x: mx.array) -> mx.array:
    codes = made[0].encode(x)
    return mx.concatenate([one.decode(codes) for one in made], axis=1)


def share(y: mx.array, x: mx.array) -> float:
    """Energy of the error of ``y`` in that of ``x``."""
    return float(np.array(mx.square(y - x).sum() / mx.square(x).sum()))


def beside(x: mx.array) -> np.ndarray:
    """Rows of one sequence side by side, ``(T, G H D)`` in float64."""
    return np.array(x[0], np.float64).swapaxes(0, 1).reshape(x.shape[2], -1)


def energies(matrix: np.ndarray) -> np.ndarray:
    """Squared singular values, the largest first."""
    return np.maximum(np.linalg.eigvalsh(matrix.T @ matrix)[::-1], 0.0)


def tail(matrix: np.ndarray, rank: int) -> float:
    """Share of the energy beyond ``rank`` singular values."""
    return energies(matrix)[rank:].sum() / energies(matrix).sum()


@pytest.fixture(params=["whole", "searched"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Axes of the whole Gram matrix, or found by a random search, as among more channels than tests have."""
    if request.param == "searched":
        monkeypatch.setattr(basis, "MOST_CHANNELS", 64)
    return request.param


# ----------------------------------------------------------------------------------------------------------- the codec


def test_joint_rank_beats_ranks_of_their_own(way: str) -> None:
    """The figures of the specification: 24 latents of three layers that share them, against 8 of each alone."""
    x = planted()
    joint, parts = decoded(codecs(x, 3), x), mx.split(x, 3, axis=1)
    alone = mx.concatenate([decoded(codecs(part, 1, rank=8), part) for part in parts], axis=1)
    assert share(joint, x) == pytest.approx(0.0035, rel=0.05)
    assert share(alone, x) == pytest.approx(0.48, rel=0.05)


@pytest.mark.parametrize("members, rank", [(1, 10), (1, 24), (2, 24), (3, 60), (3, 24)])
def test_error_is_the_energy_left_out(way: str, members: int, rank: int) -> None:
    """Eckart-Young, to 1e-4. A search misses a little where axes are alike, as those before and after the 24th are.

    Rounding bases and latents to float16 adds less than 1e-6 of the rows' energy.
    """
    x = planted(members)
    found, best = share(decoded(codecs(x, members, rank), x), x), tail(beside(x), rank)
    loose = 1e-4 if way == "whole" or rank == RANK else 0.05
    assert best * (1 - 1e-4) <= found <= best * (1 + loose) + 1e-6


def test_search_finds_the_axes_of_a_steep_spectrum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of the search that all but coincide come apart; eight decades of energies, 1e-7 of which is rounding."""
    monkeypatch.setattr(basis, "MOST_CHANNELS", 64)
    x = rows((2, 1, 600, 200), 10.0 ** -(np.arange(200) / 25))
    axes, energy = leading_axes(x, 40)
    gram = np.array(axes.swapaxes(-1, -2) @ axes)
    assert axes.shape == (2, 1, 200, 40) and np.abs(gram - np.eye(40)).max() < 1e-4
    for one in range(2):
        rows_in, found = np.array(x[one, 0], np.float64), np.array(axes[one, 0], np.float64)
        singular = energies(rows_in)
        missed = np.square(rows_in - rows_in @ found @ found.T).sum()
        assert missed <= 1.02 * singular[40:].sum() + 1e-6 * singular.sum()
        assert np.allclose(np.array(energy[one, 0])[:20], singular[:20], rtol=1e-3)


def test_rows_of_few_dimensions_come_back_and_so_do_new_ones(way: str) -> None:
    """No latent is quantised: what is left is the rounding of bases and latents to float16, of 24 numbers each."""
    x = planted(noise=0.0, tokens=512)
    made = codecs(x[:, :, :256], 3)
    y = decoded(made, x)  # the second half was not fitted on
    assert mx.abs(y - x).max() < 4 * HALF * mx.abs(x).max() * np.sqrt(RANK)
    assert share(y[:, :, 256:], x[:, :, 256:]) < (2 * HALF) ** 2
    assert not np.array(made[0].encode(x)["kept"]).any()


def test_one_layer_is_the_decomposition_of_its_own() -> None:
    x = planted(1)
    one = codecs(x, 1, rank=16)[0]
    axes = np.linalg.eigh(beside(x).T @ beside(x))[1].T[::-1][:16]
    found = np.array(one._fitted["m0.basis"], np.float64)[0].reshape(128, 16)
    assert np.abs(found @ found.T - axes.T @ axes).max() < 4 * HALF


def test_order_of_layers_does_not_matter(way: str) -> None:
    x = planted()
    parts = mx.split(x, 3, axis=1)
    turned = mx.concatenate([parts[2], parts[0], parts[1]], axis=1)
    y, z = (mx.split(decoded(codecs(rows, 3), rows), 3, axis=1) for rows in (x, turned))
    for j, place in enumerate((1, 2, 0)):
        assert mx.abs(y[j] - z[place]).max() < 4 * HALF * mx.abs(x).max()


def test_layers_hold_one_array_of_latents() -> None:
    made = codecs(planted(), 3, bits=4)
    codes = made[0].encode(planted())
    owners = {name: [j for j, one in enumerate(made) if one.owns(name)] for name in (*codes, *made[0]._fitted)}
    assert all(owner == [0] for name, owner in owners.items() if "." not in name)
    assert {name: owner for name, owner in owners.items() if "." in name} == {f"m{j}.basis": [j] for j in range(3)}
    assert codes["words"].shape == (1, 1, RANK, 1024 * 4 // 32)


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.95, 1.0])
def test_rank_by_energy(way: str, energy: float) -> None:
    """The fewest latents that keep the share of the squared singular values, at most half the numbers of a row.

    Of two sequences, those that the flatter one needs.
    """
    x = mx.concatenate([planted(2), rows((1, 4, 1024, 64), np.linspace(1, 0.1, 64))], axis=0)
    singular = np.stack([energies(beside(x[b : b + 1])) for b in range(2)])
    held = np.cumsum(singular, -1) / singular.sum(-1, keepdims=True)
    want = min(int((held < energy - 1e-6).sum(-1).max()) + 1, 128)
    one = codecs(x, 2, rank=None, energy=energy)[0]
    found = one._fitted["m0.basis"].shape[-1]
    assert want <= found <= want + (0 if way == "whole" else 3)
    kept = held[np.arange(2), found - 1]
    assert np.allclose(np.array(one._fitted["share"])[:, 0], kept, atol=1e-4 if way == "whole" else 0.02)


def test_sequences_of_a_batch_have_bases_of_their_own() -> None:
    x = planted(2, batch=2)
    both = decoded(codecs(x, 2), x)
    for b in range(2):
        single = x[b : b + 1]
        alone = decoded(codecs(single, 2), single)
        assert mx.abs(both[b : b + 1] - alone).max() < 4 * HALF * mx.abs(x).max()
        assert share(alone, single) == pytest.approx(tail(beside(single), RANK), rel=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_error_of_latents_is_all_that_quantising_adds(bits: int) -> None:
    x = planted(2, noise=0.0)
    y, rough = (decoded(codecs(x, 2, bits=b), x) for b in (16, bits))
    step = 2 / (2**bits - 1)  # of a latent: its range in a group is about 4 of its spreads, errors are a 12th of that
    assert share(rough, y) == pytest.approx(step**2 * 16 / 4 / 12, rel=0.35)


# --------------------------------------------------------------------------------------------- blocks that stay exact


def strange(x: mx.array, blocks: tuple[int, ...], seed: int = 9) -> mx.array:
    """``x`` with the tokens of these blocks of 32 replaced by noise."""
    other, out = rows(x.shape, seed=seed) * 4, []
    for i, part in enumerate(mx.split(x, x.shape[2] // 32, axis=2)):
        out.append(other[:, :, 32 * i : 32 * i + 32] if i in blocks else part)
    return mx.concatenate(out, axis=2)


@pytest.mark.parametrize("turned", [False, True])
def test_blocks_that_the_bases_miss_keep_their_rows(turned: bool) -> None:
    x = planted(2, tokens=256)
    more = mx.concatenate([strange(x[:1], (1, 5)), strange(x[:1], (5, 6, 7))], axis=0)
    made = codecs(mx.concatenate([x, x], axis=0), 2, turned=turned)
    codes, want = made[0].encode(more), np.zeros((2, 8), bool)
    want[0, [1, 5]] = want[1, [5, 6, 7]] = True
    assert np.array_equal(np.array(codes["kept"]) > 0, want) and codes["m1.exact"].shape == (5, 2, 32, 64)
    where = np.repeat(want, 32, axis=1)
    for one, part in zip(made, mx.split(more, 2, axis=1), strict=True):
        y = one.decode(codes)
        error = np.abs(np.array(y - part)).max((1, 3))
        assert error[where].max() <= (HALF * np.abs(np.array(part)).max() if turned else 0.0)
        assert error[~where].max() > 0
        for start, stop in ((0, 64), (50, 190), (192, 256), (0, 256)):
            assert mx.array_equal(one.rows(codes, start, stop), y[:, :, start:stop])
        for start, stop in ((0, 32), (0, 192), (32, 64), (224, 256)):
            assert mx.array_equal(one.decode(one.cut(codes, start, stop)), y[:, :, start:stop])
        assert any("5 blocks of 32 tokens" in line for line in one.remarks(codes))
    assert not [name for name in made[0].cut(codes, 0, 32) if name.endswith("exact")]


def test_half_of_the_rows_is_the_limit() -> None:
    """Rows of the space and rows across it in one block: the error is the share of the latter."""
    x = planted(1, noise=0.0, tokens=256)
    one, space = codecs(x, 1)[0], np.linalg.eigh(beside(x).T @ beside(x))[1].T[::-1]
    across = space[RANK:][:1].reshape(2, 1, 64).astype(np.float32)
    for error, kept in ((0.45, False), (0.55, True)):
        size = mx.sqrt(mx.square(x[:, :, :32]).sum() / 32) * (error / np.sqrt(1 - error**2))
        block = x[:, :, :32] + size * mx.array(across)[None]
        assert bool(np.array(one.encode(block)["kept"])[0, 0]) == kept


def test_blocks_of_the_fit_are_never_kept() -> None:
    """A rank that leaves most of the energy out is what was asked for, for every block like those of the prompt."""
    x = rows((1, 4, 512, 64))
    made = codecs(x, 2, rank=16)
    assert share(decoded(made, x), x) > 0.8 and not np.array(made[0].encode(x)["kept"]).any()
    assert np.array(made[0].encode(strange(planted(2, tokens=64), (0, 1)))["kept"]).any()


@pytest.mark.parametrize("bits", [4, 16])
def test_latents_beyond_float16(bits: int) -> None:
    """256 numbers of 6,000 in a row are one latent of 96,000: such blocks keep their rows."""
    x = planted(2, tokens=256)
    large = mx.concatenate([x[:, :, :128], x[:, :, 128:] + 6000], axis=2)
    made = codecs(large, 2, bits=bits)
    assert np.array_equal(np.array(made[0].encode(large)["kept"])[0], [0, 0, 0, 0, 1, 1, 1, 1])
    assert identical(decoded(made, large)[:, :, 128:], large[:, :, 128:])


@pytest.mark.parametrize("bits", [4, 5, 16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kept", [(), (1, 5, 6)])
def test_attention_is_that_on_decoded_rows(bits: int, batch: int, kept: tuple[int, ...]) -> None:
    """Products on latents against products on rows: float32 sums in another order."""
    x = planted(2, tokens=256, batch=batch)
    made = codecs(x, 2, bits=bits)
    codes = made[0].encode(mx.concatenate([strange(x[:1], kept), x[1:]], axis=0))
    assert ("m1.exact" in codes) == bool(kept)
    q, p = rows((batch, 2, 5, 64), seed=2), mx.softmax(rows((batch, 2, 5, 256), seed=3), axis=-1)
    for one in made:
        y = one.decode(codes)
        assert mx.allclose(one.scores(q, codes), q @ y.swapaxes(-1, -2), rtol=1e-4, atol=1e-2)
        assert mx.allclose(one.mix(p, codes), p @ y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["zeros", "few rows", "one channel"])
def test_edges(kind: str) -> None:
    x = {
        "zeros": mx.zeros((1, 2, 64, 32)),
        "few rows": rows((1, 2, 40, 32)),
        "one channel": mx.pad(rows((1, 2, 64, 1)), [(0, 0)] * 3 + [(0, 31)]),
    }[kind]
    one = codecs(x, 1, rank=None, bits=4)[0]
    y = one.decode(one.encode(x[:, :, :32]), mx.float16)
    assert mx.isfinite(y).all() and (kind != "zeros" or mx.all(y == 0))


# ----------------------------------------------------------------------------------------------------------- the cache


def cache(shape: tuple[int, int, int, int] = (1, 2, 64, 64), rope: Any = None, **fields: Any) -> CompressedKVCache:
    config = KVCacheConfig(method="xkv", **fields)
    return CompressedKVCache(config, LayerInfo(head_dim=shape[2], value_dim=shape[3], kv_heads=shape[1], rope=rope))


def lowrank(members: int, tokens: int, seed: int = 0) -> list[Tensors]:
    """Queries, keys and values of layers that share what they say."""
    keys, values = (mx.split(planted(members, 0.1, tokens, seed=seed + i), members, axis=1) for i in (1, 2))
    return [Tensors(tensors(tokens, seed=seed + j).q, keys[j], values[j]) for j in range(members)]


@pytest.mark.parametrize("members, numbers, rank, bits, per_element", [(2, 256, 48, 4, None), (3, 384, 16, 3, None)])
def test_bytes(members: int, numbers: int, rank: int, bits: int, per_element: float | None) -> None:
    """``r (bits + 32 / g) / (G C) + 16 r / T`` bits per element, a flag per block and 8 bytes of figures."""
    tokens = 512
    caches = group("xkv", members, xkv_rank=rank, xkv_latent_bits=bits)
    run(caches, lowrank(members, tokens), [tokens - 1, 1])
    for name, r in (("k", rank), ("v", ceil(1.5 * rank))):
        held = sum(a.nbytes for c in caches for n, a in c.arrays().items() if n.startswith(name))
        assert held * 8 == tokens * numbers * bits_per_element(bits, r, numbers, tokens) + 8 * (tokens // 32 + 8)


def bits_per_element(bits: int, r: int, numbers: int, tokens: int) -> float:
    return r * (bits + 32 / 32) / numbers + 16 * r / tokens


@pytest.mark.parametrize(
    "r, tokens, want", [(384, 4096, 2.44), (384, 65536, 1.03), (576, 4096, 3.66), (576, 65536, 1.55)]
)
def test_storage_table_of_the_specification(r: int, tokens: int, want: float) -> None:
    """Two layers of 1,024 numbers: the formula that ``test_bytes`` checks, at the sizes of the table."""
    assert bits_per_element(4, r, 2048, tokens) == pytest.approx(want, abs=0.006)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_fitted_on_the_first_tokens_however_they_come(members: int, chunk: int) -> None:
    """``xkv_max_ctx`` tokens do not wait for the end of the prompt; what comes later is projected or kept."""
    data = [
        Tensors(*(mx.concatenate([getattr(d, n) for d in parts], axis=2) for n in "qkv"))
        for parts in zip(lowrank(members, 300), layers(members, seed=3, tokens=100), strict=True)
    ]
    fields: dict[str, Any] = {"xkv_rank": 32, "xkv_max_ctx": 128}
    once, often, late = (group("xkv", members, **{**fields, "xkv_max_ctx": most}) for most in (128, 128, 8192))
    run(once, data, [400])
    run(often, data, split(400, chunk))
    run(late, data, [400])
    for a, b in zip(once, often, strict=True):
        assert same_state(a, b) and a.store.keys.n_sealed == 384
        assert any("m0.exact" in name for name in once[0].arrays())
    assert not any(c.store.sealed for c in late)


def test_fitted_on_the_whole_prompt() -> None:
    data, whole, pieces, first = lowrank(1, 401)[0], *(cache(xkv_rank=16) for _ in range(2)), cache(xkv_max_ctx=100)
    feed(whole, data, [400, 1])
    feed(pieces, data, [*split(400, 77), 1])
    feed(first, data, [400, 1])
    assert same_state(whole, pieces) and not same_state(whole, first)
    assert "8192 tokens, from 64 (keys) and 96 (values) on" in whole.describe()["notes"][1]
    short = cache(xkv_rank=16)
    feed(short, data.part(0, 50), [49, 1])
    assert not short.store.sealed
    feed(short, data.part(50, 100), [1] * 50)
    assert (short.store.keys.n_sealed, short.store.values.n_sealed) == (96, 96)


def test_keys_before_rope() -> None:
    rope = probe_rotation(nn.RoPE(64), 64)
    data = lowrank(1, 300)[0]
    turned = Tensors(data.q, rope.turn(data.k, mx.arange(300)[None, None]), data.v)
    errors = []
    for known in (rope, None):
        c = cache(rope=known, xkv_rank=24)
        feed(c, turned.part(0, 299), [250, *[1] * 49])
        keys, values = c.materialize()
        errors.append(mx.square(keys - turned.k[:, :, :299]).mean().item())
        c.update_and_fetch(turned.k[:, :, 299:], turned.v[:, :, 299:])
        want = mx.concatenate([keys, turned.k[:, :, 299:]], 2), mx.concatenate([values, turned.v[:, :, 299:]], 2)
        out = c.attend(data.q[:, :, 299:], scale=0.125)
        assert mx.allclose(out, reference.attention(data.q[:, :, 299:], *want, 0.125, None), rtol=1e-4, atol=1e-4)
    assert errors[0] < 0.1 * errors[1]


def test_kept_blocks_survive_trims_and_copies() -> None:
    """Decoded tokens of another kind: their rows stay, those before them do not change, and a trim takes them back."""
    data, c = lowrank(2, 256), group("xkv", 2, xkv_rank=24)
    run(c, data, [255, 1])
    other = layers(2, seed=5, tokens=100)
    run(c, other, [1] * 100)
    for one, rows_in in zip(c, other, strict=True):
        keys, _ = one.materialize()
        assert mx.array_equal(keys[:, :, 256:], rows_in.k) and one.store.keys.n_sealed == 352
        assert any("3 blocks of 32 tokens kept" in note for note in one.describe()["notes"])
    before = [one.materialize() for one in c]
    for one in c:
        one.trim(60)
    for one, (keys, values) in zip(c, before, strict=True):
        now = one.materialize()
        assert mx.array_equal(now[0], keys[:, :, :296]) and mx.array_equal(now[1], values[:, :, :296])
        assert one.store.arrays()[f"k.m{one.layer.member}.exact"].shape[0] == 1


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("known", [True, False])
def test_groups_that_would_save_nothing_stay_as_they_are(dtype: mx.Dtype, known: bool) -> None:
    """Half the numbers of a row as rank, from fewer than 5 tokens for 4 numbers: ``r (1 / GC + 1 / T) >= 0.9``."""
    rope = probe_rotation(nn.RoPE(64), 64) if known else None
    c, data = cache(rope=rope, xkv_energy_threshold=1.0, xkv_max_ctx=128), tensors(192, dtype=dtype)
    feed(c, data, [191, 1])
    keys, values = c.materialize()
    assert c.store.keys.n_sealed == 192 and mx.array_equal(values, data.v)
    assert mx.abs(keys - data.k).max() <= (3 * HALF * mx.abs(data.k).max() if known else 0.0)
    assert c.held_bytes()["packed"] <= 192 * 2 * 64 * 2 * dtype.size + 24
    assert c.store.arrays()["k.m0.rows"].dtype == (mx.float16 if known else dtype)
    lines = [note for note in c.describe()["notes"] if "would save too little" in note]
    assert [line[:18] for line in lines] == ["keys: as they came", "values: as they ca"]
    assert "64 latents for rows of 128 numbers, from 128 tokens" in lines[0]
    assert isinstance(c.store.keys.packed.codec, JointRows)  # type: ignore[union-attr]


@pytest.mark.parametrize("fields", [{"xkv_energy_threshold": 1.0, "xkv_max_ctx": 128}, {"xkv_rank": 24}])
def test_layers_loaded_one_by_one_find_what_they_share(fields: dict[str, Any]) -> None:
    """Rows that stay as they are, and blocks that do: each layer brings its own, the first the figures."""
    caches, strangers = group("xkv", 2, **{"xkv_rank": None, **fields}), layers(2, seed=5, tokens=70)
    run(caches, lowrank(2, 192) if "xkv_rank" in fields else layers(2, tokens=192), [191, 1])
    run(caches, strangers, [1] * 70)
    loaded = [CompressedKVCache.from_state(c.state) for c in caches]
    more = layers(2, seed=8, tokens=45)
    for a, b in zip(run(loaded, more, [1] * 45), run(caches, more, [1] * 45), strict=True):
        assert mx.array_equal(a, b)
    assert all(same_state(a, b) for a, b in zip(loaded, caches, strict=True))
    assert {"k.m1.rows", "k.m1.exact"} & caches[1].store.arrays().keys()
    for c in (*loaded, *caches):
        c.trim(90)
    run(loaded, more, [1] * 45)
    run(caches, more, [1] * 45)
    assert all(same_state(a, b) for a, b in zip(loaded, caches, strict=True))


def test_receipt_tells_the_ranks() -> None:
    c = cache(xkv_rank=16)
    feed(c, lowrank(1, 300)[0], [299, 1])
    text = "{} latents for rows of 128 numbers keep "
    for note, start in zip(c.describe()["notes"][-2:], ("keys: 16", "values: 24"), strict=True):
        assert note.startswith(text.format(start))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_groups_of_a_model(size: int) -> None:
    """Five layers: rows of a group are as wide as its layers together, and keys are those before their positions."""
    model = tiny.build("llama", num_hidden_layers=5)
    config = KVCacheConfig(method="xkv", xkv_group_size=size, xkv_rank=8)
    caches = KVCacheBuilder.for_model(model, config)
    assert [(c.layer.group, c.layer.member) for c in caches] == [divmod(i, size) for i in range(5)]
    for part in (tiny.tokens(100), tiny.tokens(1)):
        mx.eval(model(part, cache=caches))
    width = caches[0].layer.kv_heads * caches[0].layer.head_dim
    for c in caches:
        assert c.store.keys.n_sealed == 96 and c.store.keys.spec.rotation is not None
        text = next(note for note in c.describe()["notes"] if note.startswith("keys: "))
        assert f"rows of {c.layer.members * width} numbers" in text


def test_options_have_effects() -> None:
    data = tensors(300)
    changes: dict[str, Any] = {"xkv_rank": 20, "xkv_latent_bits": 3, "xkv_group_quant_size": 64, "xkv_max_ctx": 64}
    base: dict[str, Any] = {"xkv_rank": 16}
    made = [cache(**base)] + [cache(**{**base, name: value}) for name, value in changes.items()]
    made += [cache(), cache(xkv_energy_threshold=0.5)]
    for c in made:
        feed(c, data, [299, 1])
    assert all(not same_state(a, b) for i, a in enumerate(made) for b in made[:i])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("xkv_group_size", 0),
        ("xkv_rank", 0),
        ("xkv_energy_threshold", 0.0),
        ("xkv_latent_bits", 7),
        ("xkv_group_quant_size", 1),
        ("xkv_max_ctx", 31),
    ],
)
def test_refusals(field: str, value: Any) -> None:
    with pytest.raises(QuantizerConfigError, match=field):
        KVCacheBuilder.for_model(tiny.build("llama"), KVCacheConfig(**{"method": "xkv", field: value}))
