"""SVDq: latent channels of the keys, bits that fall along them, groups of tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.matrix import feed, same_state, split, stored_bytes, tensors
from tests.parts.test_kvtc import fitted, relative, rows
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.attention import reference
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.codecs.affine import ChannelAffine
from veloxquant_mlx.codecs.latent import LatentAffine, scheduled
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.models.rope import probe_rotation

SCHEDULE = (8, 4, 2, 1, 1, 0, 0, 0)


def codec(schedule: tuple[int, ...] = SCHEDULE, group: int = 32, rank: int | None = None, energy: float = 0.95) -> Any:
    return LatentAffine(schedule, group, rank=rank, energy=energy, fit_rows=1)


def cache(shape: tuple[int, int, int, int] = (1, 2, 64, 64), rope: Any = None, **fields: Any) -> CompressedKVCache:
    config = KVCacheConfig(method="svdq", **fields)
    return CompressedKVCache(config, LayerInfo(head_dim=shape[2], value_dim=shape[3], kv_heads=shape[1], rope=rope))


def decayed(decay: float, n: int = 2048) -> mx.array:
    return rows((1, 1, n, 128), np.sqrt(decay ** np.arange(128.0)))


@pytest.mark.parametrize("decay, figure", [(1.0, 0.410), (0.97, 0.140), (0.94, 0.036), (0.90, 0.0075)])
def test_figures_of_the_specification(decay: float, figure: float) -> None:
    """Where there is no spectrum there is nothing to gain; two bits per channel directly make .154 of any."""
    x = decayed(decay, 4096)
    assert relative(fitted(codec(rank=128), x), x) == pytest.approx(figure, rel=0.03)
    assert relative(ChannelAffine(2, 32), x) == pytest.approx(0.154, rel=0.02)


def test_error_of_a_rank_is_the_energy_left_out() -> None:
    x = decayed(0.95, 512)
    centred = np.array(x - x.mean(axis=2, keepdims=True), np.float64)[0, 0]
    singular = np.linalg.svd(centred, compute_uv=False)
    for rank in (8, 32, 100):
        basis = np.array(codec((8,), rank=rank).fit(x)["basis"], np.float64)[0, 0]
        missed = np.square(centred - centred @ basis @ basis.T).sum()
        assert missed == pytest.approx(np.square(singular[rank:]).sum(), rel=1e-3)


def test_decoding_adds_no_error_to_that_of_the_latents() -> None:
    """The basis is orthogonal, and so is the rotation by positions."""
    x = decayed(0.97, 512)
    one = fitted(codec((4,), rank=128), x)
    basis, mean = one._fitted["basis"], one._fitted["mean"]
    z, y = (x - mean) @ basis, one.decode(one.encode(x))
    latent = (y - mean) @ basis
    assert mx.square(latent - z).sum().item() == pytest.approx(mx.square(y - x).sum().item(), rel=1e-3)


@pytest.mark.parametrize("energy", [0.5, 0.95, 1.0])
def test_rank_by_squared_energy(energy: float) -> None:
    """The smallest that keeps the share in every head: the flatter of two spectra needs more."""
    x = mx.concatenate([decayed(0.9, 512), decayed(0.97, 512)], axis=1)
    singular = np.linalg.svd(np.array(x - x.mean(axis=2, keepdims=True), np.float64)[0], compute_uv=False) ** 2
    share = np.cumsum(singular, -1) / singular.sum(-1, keepdims=True)
    want = int((share < energy - 1e-6).sum(-1).max()) + 1
    assert codec(energy=energy).fit(x)["bits"].shape[-1] == min(want, 128)


@pytest.mark.parametrize(
    "schedule, rank, bits",
    [
        (SCHEDULE, 8, SCHEDULE),
        ((8, 4, 0), 8, (8, 8, 8, 4, 4, 4, 0, 0)),
        ((4, 2), 3, (4, 4, 2)),
        ((2, 4), 4, (2, 2, 4, 4)),
        ((8, 4, 2, 1), 2, (8, 4)),
    ],
)
def test_slices_of_the_schedule(schedule: tuple[int, ...], rank: int, bits: tuple[int, ...]) -> None:
    assert tuple(scheduled(schedule, rank)) == bits


def test_bits_need_not_fall() -> None:
    x = decayed(0.95, 256)
    assert relative(fitted(codec((2, 8), rank=64), x), x) > relative(fitted(codec((8, 2), rank=64), x), x)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [32, 64])
def test_products_are_those_of_decoded_rows(dim: int, group: int) -> None:
    x = rows((2, 2, 256, dim), np.linspace(4, 0.05, dim)) + rows((2, 2, 1, dim), seed=1)
    one = fitted(codec((8, 6, 5, 4, 3, 2, 1, 0), group), x)
    codes, q, p = one.encode(x), rows((2, 2, 5, dim), seed=2), mx.softmax(rows((2, 2, 5, 256), seed=3), axis=-1)
    y = one.decode(codes)
    assert mx.allclose(one.scores(q, codes), q @ y.swapaxes(-1, -2), rtol=1e-4, atol=2e-3)
    assert mx.allclose(one.mix(p, codes), p @ y, rtol=1e-4, atol=1e-4)
    assert mx.allclose(one.rows(codes, 70, 90), y[:, :, 70:90], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["zeros", "rank 2", "few rows"])
def test_edges(kind: str) -> None:
    x = {
        "zeros": mx.zeros((1, 1, 64, 32)),
        "rank 2": rows((1, 1, 64, 2)) @ rows((1, 1, 2, 32), seed=1),
        "few rows": rows((1, 1, 2, 32)),
    }[kind]
    one = fitted(codec(), x)
    more = x if kind != "few rows" else rows((1, 1, 64, 32))
    y = one.decode(one.encode(more), mx.float16)
    assert mx.isfinite(y).all() and (kind != "zeros" or mx.all(y == 0))
    if kind == "rank 2":  # 8 bits and 4 bits
        assert one._fitted["bits"].shape[-1] == 2 and relative(one, x) < 0.01


@pytest.mark.parametrize("fields", [{}, {"svdq_group_size": 64}, {"svdq_bit_schedule": (4, 2, 0, 0)}])
def test_bytes(fields: dict[str, Any]) -> None:
    """K: ``r / D (mean bits + 32 / g of the channels with bits)`` and the basis; V: as it came."""
    c, data = cache((1, 1, 128, 128), svdq_rank=128, n_calib_tokens=64, **fields), tensors(128, (1, 1, 128, 128))
    feed(c, tensors(192, (1, 1, 128, 128), dtype=mx.float16), [191, 1])
    before, start = stored_bytes(c), c._store.keys.packed.n  # type: ignore[union-attr]
    feed(c, tensors(64, (1, 1, 128, 128), dtype=mx.float16, seed=4), [1] * 64)
    assert c._store.keys.packed.n == start + 64 and data.k.shape[2] == 128  # type: ignore[union-attr]
    schedule, group = fields.get("svdq_bit_schedule", SCHEDULE), fields.get("svdq_group_size", 32)
    keys = np.mean(schedule) + 32 / group * np.mean(np.array(schedule) > 0)
    assert stored_bytes(c) - before == 64 * 128 * (keys + 16) / 8
    if not fields:
        assert keys == 2.625
    basis = c._store.keys.arrays()["fitted.basis"]
    assert basis.nbytes == 4 * 128 * 128 * np.mean(np.array(schedule) > 0)


def test_fitted_on_the_whole_prompt_however_it_came() -> None:
    data, whole, pieces, first = tensors(301), cache(), cache(), cache(n_calib_tokens=64)
    feed(whole, data, [300, 1])
    feed(pieces, data, [*split(300, 77), 1])
    feed(first, data, [*split(300, 77), 1])
    assert same_state(whole, pieces) and not same_state(whole, first)
    notes = whole.describe()["notes"]
    assert "once there are 128 tokens" in notes[1] and notes[2] == "values are not compressed"
    short = cache()
    feed(short, tensors(100), [99, 1])
    assert not short._store.sealed
    feed(short, tensors(60, seed=2), [1] * 60)
    assert short._store.keys.packed is not None and short._store.keys.packed.n == 128


def test_keys_before_rope_and_values_exact() -> None:
    rope = probe_rotation(nn.RoPE(64), 64)
    base = rows((1, 2, 1, 64)) + 0.05 * rows((1, 2, 300, 64), np.linspace(1, 0, 64), seed=1)
    data = tensors(300)
    turned = type(data)(data.q, rope.turn(base, mx.arange(300)[None, None]), data.v)
    errors = []
    for known in (rope, None):
        c = cache(rope=known)
        feed(c, turned, [299, 1])
        keys, values = c.materialize()
        assert mx.array_equal(values, data.v)
        errors.append(mx.square(keys - turned.k).mean().item())
        want = reference.attention(data.q[:, :, -1:], keys, values, 0.125, None)
        assert mx.allclose(c.attend(data.q[:, :, -1:], scale=0.125), want, rtol=1e-4, atol=1e-4)
    assert errors[0] < 0.1 * errors[1]


def test_options_have_effects() -> None:
    data, made = tensors(300), []
    changes = {"svdq_rank": 20, "svdq_energy_threshold": 0.5, "svdq_bit_schedule": (4, 2), "svdq_group_size": 64}
    for fields in ({}, *({name: value} for name, value in changes.items())):
        made.append(cache(**fields))
        feed(made[-1], data, [299, 1])
    assert all(not same_state(made[0], other) for other in made[1:])


@pytest.mark.parametrize(
    "fields",
    [
        {"svdq_rank": 7},
        {"svdq_rank": 129},
        {"svdq_energy_threshold": 0.0},
        {"svdq_energy_threshold": 1.01},
        {"svdq_bit_schedule": ()},
        {"svdq_bit_schedule": (7,)},
        {"svdq_bit_schedule": (0, 0)},
        {"svdq_group_size": 16},
    ],
)
def test_refusals(fields: dict[str, Any]) -> None:
    with pytest.raises(QuantizerConfigError, match=next(iter(fields))):
        KVCacheFactory.create(KVCacheConfig(**{"method": "svdq", **fields}))
