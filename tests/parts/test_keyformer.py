"""The noise and the temperature of keyformer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import fixture
from tests.fixture import fill, kept, new_cache
from tests.matrix import feed, split, tensors
from veloxquant_mlx.cache.store import Store
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.policies.gumbel import NoisyAttention, noise, stream

KEYFORMER: dict[str, Any] = {
    "method": "keyformer",
    "keyformer_budget": 12,
    "keyformer_n_sink": 0,
    "keyformer_recent": 6,
    "keyformer_tau": 0.0,
}


def test_noise_is_standard_gumbel() -> None:
    """200 000 numbers: mean 0.5772 and variance pi^2 / 6, within five standard errors."""
    g = np.array(
        noise(stream(1, 0), mx.arange(500)[:, None], mx.arange(4).reshape(4, 1, 1), mx.arange(100)), np.float64
    )
    n = g.size
    assert g.shape == (4, 500, 100) and np.isfinite(g).all() and len(np.unique(g)) > 0.98 * n
    assert abs(g.mean() - np.euler_gamma) < 5 * np.pi / np.sqrt(6 * n)
    assert abs(g.var() - np.pi**2 / 6) < 5 * np.sqrt(4.4 / n) * np.pi**2 / 6
    neighbours = [(g[:, 1:] * g[:, :-1]), (g[..., 1:] * g[..., :-1]), (g[1:] * g[:-1]), (g[:, 1:, :-1] * g[:, :-1, 1:])]
    for product in neighbours:  # no two axes run into each other
        assert abs(product.mean() - g.mean() ** 2) < 5 * 2.5 / np.sqrt(product.size)


def test_noise_depends_on_positions_alone() -> None:
    heads = mx.arange(4).reshape(2, 2, 1, 1)
    whole = np.array(noise(stream(1, 0), mx.arange(48)[:, None], heads, mx.arange(48)))
    rows = [40, 3, 17, 0]
    part = np.array(noise(stream(1, 0), mx.arange(7, 9)[:, None], heads, mx.array(rows)))
    assert np.array_equal(part, whole[:, :, 7:9][..., rows])
    assert not np.array_equal(whole, np.array(noise(stream(2, 0), mx.arange(48)[:, None], heads, mx.arange(48))))
    assert not np.array_equal(whole, np.array(noise(stream(1, 1), mx.arange(48)[:, None], heads, mx.arange(48))))
    assert stream(1, 0) != stream(0, 1)


def test_noise_picks_rows_as_often_as_attention_would() -> None:
    """The largest of z + g is row j with probability softmax(z)_j; 10 000 draws, four standard errors at most 0.02."""
    z = fixture.Z[0, 7, :8]
    g = np.array(noise(stream(9, 0), mx.arange(10_000)[:, None], mx.array(0), mx.arange(8)))
    found = np.bincount((z + g).argmax(axis=-1), minlength=8) / 10_000
    assert np.abs(found - fixture.softmax(z)).max() < 0.02


def test_seeds_choose_different_rows() -> None:
    sets = []
    for seed in (0, 0, 1, 2):
        fill(cache := new_cache(**KEYFORMER | {"keyformer_tau": None, "keyformer_seed": seed}), [48])
        sets.append(kept(cache))
    assert sets[0] == sets[1] and sets[0] != sets[2] != sets[3] != sets[0]


def test_layers_have_noise_of_their_own() -> None:
    sets = []
    for index in (0, 1):
        layer = LayerInfo(head_dim=8, value_dim=8, kv_heads=2, query_heads=4, index=index)
        fields: dict[str, Any] = KEYFORMER | {"keyformer_tau": 1.0}
        fill(cache := new_cache(layer=layer, **fields), [48])
        sets.append(kept(cache))
    assert sets[0] != sets[1]


@pytest.mark.parametrize("chunks", [[44], [43, 1], split(44, 7)], ids=str)
def test_temperature_follows_the_decode_steps(chunks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """1 for the prompt, then a quarter of the way per decode step; a second prompt begins again."""
    used: list[float] = []
    original = NoisyAttention.temperature

    def spy(self: NoisyAttention, store: Store) -> Any:
        tau = original(self, store)
        used.append(round(float(tau), 6))
        return tau

    monkeypatch.setattr(NoisyAttention, "temperature", spy)
    fields = {"keyformer_tau": None, "keyformer_tau_init": 1.0, "keyformer_tau_end": 2.0, "keyformer_anneal_steps": 3}
    fill(cache := new_cache(**KEYFORMER | fields), chunks)
    assert set(used) == {1.0}
    used.clear()
    feed(cache, tensors(6, (1, 2, 8, 8)), [1, 1, 1, 1, 2])
    assert used == [1.333333, 1.666667, 2.0, 2.0, 1.0]


def test_temperature_matters() -> None:
    moving: dict[str, Any] = {"keyformer_tau": None, "keyformer_tau_end": 0.02, "keyformer_anneal_steps": 2}
    cases: list[dict[str, Any]] = [
        {},
        {"keyformer_anneal_steps": 0},
        {"keyformer_tau": 1.0},
        {"keyformer_tau_init": 0.02},
    ]
    sets = []
    for more in cases:
        fields: dict[str, Any] = KEYFORMER | {"keyformer_recent": 1} | moving | more
        fill(cache := new_cache(**fields), [20])
        fill(cache, [1] * 28, start=20, ends=False)
        sets.append(kept(cache))
    assert sets[0] != sets[1] and sets[1] == sets[2] and sets[0] != sets[3]
