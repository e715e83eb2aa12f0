"""h2o, tova, keyformer and morphkv against the golden sets and decode traces of their specifications."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import fixture
from tests.fixture import SCALE, fill, kept, new_cache
from tests.matrix import Tensors, feed, split, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory
from veloxquant_mlx.attention import reference
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.exceptions import KernelUnavailableError, QuantizerConfigError
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.policies import observed
from veloxquant_mlx.policies.gumbel import noise, stream

H2O: dict[str, Any] = {"method": "h2o", "h2o_budget": 12, "h2o_n_sink": 0, "h2o_grace": 6, "h2o_decay": 1.0}
KEYFORMER: dict[str, Any] = {
    "method": "keyformer",
    "keyformer_budget": 12,
    "keyformer_n_sink": 0,
    "keyformer_recent": 6,
    "keyformer_tau": 0.0,
}
TOVA: dict[str, Any] = {"method": "tova", "tova_budget": 12, "tova_n_sink": 0}
MORPH: dict[str, Any] = {"method": "morphkv", "morphkv_budget": 16, "morphkv_n_sink": 0}
PAPER_SETS = [[0, 1, 3, 5, 8, 9, *range(42, 48)], [0, 1, 2, 3, 4, 5, *range(42, 48)]]
SETS: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "h2o, paper": (H2O, PAPER_SETS),
    "h2o, decay and sinks": (
        {"method": "h2o", "h2o_budget": 12, "h2o_n_sink": 2, "h2o_grace": 4},
        [[0, 1, 2, 3, 5, 6, 8, 9, *range(44, 48)], [0, 1, 2, 3, 4, 5, 6, 13, *range(44, 48)]],
    ),
    "keyformer without noise is h2o": (KEYFORMER, PAPER_SETS),
    "keyformer, very hot: the oldest": (
        KEYFORMER | {"keyformer_tau": 1e6},
        [[*range(6), *range(42, 48)]] * 2,
    ),
    "tova, paper": (TOVA, [[0, 3, 5, 11, 15, 21, 22, 26, 31, 41, 43, 47]]),
    "tova, four sinks": (TOVA | {"tova_n_sink": 4}, [[0, 1, 2, 3, 5, 11, 21, 22, 26, 31, 43, 47]]),
    "tova, reference": (TOVA | {"tova_backend": "reference"}, [[0, 3, 5, 11, 15, 21, 22, 26, 31, 41, 43, 47]]),
    "morphkv": (
        MORPH,
        [[8, 9, 12, 20, 22, 23, 32, 38, *range(40, 48)], [2, 3, 11, 13, 18, 22, 26, 31, *range(40, 48)]],
    ),
}
TRACES: dict[str, tuple[dict[str, Any], list[list[int]], list[list[int]]]] = {
    "h2o": (
        H2O,
        [[0, 1, 2, 5, 8, 9, *range(38, 44)], [*range(6), *range(38, 44)]],
        [[0, 1, 2, 5, 8, 9, *range(42, 48)], [*range(6), *range(42, 48)]],
    ),
    "keyformer": (
        KEYFORMER,
        [[0, 1, 2, 5, 8, 9, *range(38, 44)], [*range(6), *range(38, 44)]],
        [[0, 1, 2, 5, 8, 9, *range(42, 48)], [*range(6), *range(42, 48)]],
    ),
    "tova": (
        TOVA,
        [[5, 6, 8, 13, 14, 18, 19, 22, 32, 37, 39, 43]],
        [[5, 6, 8, 13, 18, 19, 32, 37, 39, 43, 44, 47]],
    ),
}
CHUNKS = {"whole": [48], "sevens": split(48, 7), "as mlx_lm": [47, 1]}


@pytest.mark.parametrize("case", SETS)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_golden_sets(case: str, chunks: list[int]) -> None:
    fields, want = SETS[case]
    fill(cache := new_cache(**fields), chunks)
    assert kept(cache) == want


@pytest.mark.parametrize("method", TRACES)
@pytest.mark.parametrize("chunks", [[44], [43, 1], split(44, 7)], ids=str)
def test_golden_decode_traces(method: str, chunks: list[int]) -> None:
    fields, prompt, later = TRACES[method]
    fill(cache := new_cache(**fields), chunks)
    assert kept(cache) == prompt
    fill(cache, [1] * 4, start=44, ends=False)
    assert kept(cache) == later


# ---------------------------------------------------------------------------------- decode steps, against a simulation


def summed(state: dict[str, Any], z: np.ndarray, rows: list[list[int]], i: int, decay: float) -> list[np.ndarray]:
    """Scores by head after query ``i``: sums per position, every query's softmax over what is held."""
    acc = state.setdefault("acc", np.zeros((2, 48)))
    acc *= decay
    for head, held in enumerate(rows):
        acc[head, held] += fixture.softmax(z[2 * head : 2 * head + 2, i][:, held]).mean(axis=0)
    return [acc[head, held] for head, held in enumerate(rows)]


def last(state: dict[str, Any], z: np.ndarray, rows: list[list[int]], i: int) -> list[np.ndarray]:
    return [fixture.softmax(z[:, i][:, rows[0]]).mean(axis=0)] * 2


def recent(state: dict[str, Any], z: np.ndarray, rows: list[list[int]], i: int) -> list[np.ndarray]:
    if i < 8:
        return []
    scores = []
    for head, held in enumerate(rows):
        old = [p for p in held if p <= i - 8]
        shares = fixture.softmax(z[2 * head : 2 * head + 2, i - 7 : i + 1][..., old])
        scores.append(np.concatenate([shares.sum(axis=1).mean(axis=0), np.full(len(held) - len(old), np.inf)]))
    return scores


def full_logits() -> np.ndarray:
    return SCALE * fixture.Q @ np.repeat(fixture.K, 2, axis=0).swapaxes(1, 2)


def noisy_logits(seed: int, tau: float) -> np.ndarray:
    at, heads = mx.arange(48)[:, None], mx.arange(4).reshape(4, 1, 1)
    return (full_logits() + np.array(noise(stream(seed, 0), at, heads, mx.arange(48)))) / tau


RULES: dict[str, tuple[dict[str, Any], Any, int, int]] = {
    # fields, rule, sinks, recent rows (the budget is 12)
    "h2o": (H2O | {"h2o_grace": 3}, lambda *a: summed(*a, decay=1.0), 0, 3),
    "h2o, nothing recent": (H2O | {"h2o_grace": 0, "h2o_n_sink": 1}, lambda *a: summed(*a, decay=1.0), 1, 1),
    "h2o, decay": (H2O | {"h2o_grace": 3, "h2o_decay": 0.9}, lambda *a: summed(*a, decay=0.9), 0, 3),
    "tova": (TOVA, last, 0, 1),
    "tova, sinks": (TOVA | {"tova_n_sink": 4}, last, 4, 1),
    "keyformer": (
        KEYFORMER | {"keyformer_tau": 0.5, "keyformer_seed": 3, "keyformer_recent": 2, "keyformer_n_sink": 1},
        lambda state, z, rows, i: summed(state, noisy_logits(3, 0.5), rows, i, 1.0),
        1,
        2,
    ),
    "morphkv": (MORPH | {"morphkv_budget": 12}, recent, 0, 8),
    "morphkv, sinks": (MORPH | {"morphkv_budget": 12, "morphkv_n_sink": 2}, recent, 2, 8),
}


@pytest.mark.parametrize("case", RULES)
def test_every_decode_step_drops_the_row_of_the_rule(case: str) -> None:
    """Prompt of 20 tokens, 28 decoded ones: the held positions after each equal those of a float64 simulation."""
    fields, rule, sinks, recents = RULES[case]
    cache, state, z = new_cache(**fields), {}, full_logits()
    rows: list[list[int]] = [[], []]
    for i in range(48):
        rows = [[*held, i] for held in rows]
        scores = rule(state, z, rows, i)
        if i < 19:
            continue
        for head, held in enumerate(rows):
            guarded = np.array([p < sinks or p > i - recents for p in held])
            order = np.argsort(np.where(guarded, -np.inf, -scores[head]), kind="stable")[:12]
            rows[head] = sorted(held[j] for j in order)
        fill(cache, [19, 1] if i == 19 else [1], start=0 if i == 19 else i, ends=False)
        found = kept(cache)
        assert found == rows[: len(found)], i
        assert cache.offset == i + 1


# --------------------------------------------------------------------------------------------------- caches as a whole

FOUR: dict[str, dict[str, Any]] = {
    "h2o": H2O,
    "tova": TOVA,
    "keyformer": KEYFORMER | {"keyformer_tau": 1.0},
    "morphkv": MORPH,
}


@pytest.mark.parametrize("method", FOUR)
def test_one_row_goes_for_every_token(method: str) -> None:
    """At the budget every decode step drops exactly one row per head, and never the newest."""
    fill(cache := new_cache(**FOUR[method]), [30])
    budget = len(kept(cache)[0])
    for i in range(30, 48):
        before = kept(cache)
        fill(cache, [1], start=i, ends=False)
        for old, new in zip(before, kept(cache), strict=True):
            assert len(new) == budget and i in new and len(set(old) - set(new)) == 1
    assert (cache.positions.shape[1] == 1) == (method == "tova")


@pytest.mark.parametrize("method", FOUR)
def test_size_never_grows(method: str) -> None:
    cache = new_cache(**FOUR[method])
    fill(cache, [20], ends=True)
    sizes = set()
    for i in range(20, 48):
        fill(cache, [1], start=i, ends=False)
        sizes.add(cache.nbytes)
    assert len(sizes) == 1


@pytest.mark.parametrize("method", FOUR)
def test_a_snapshot_continues_as_the_original(method: str) -> None:
    """Everything that the next choice depends on is in the state."""
    fill(cache := new_cache(**FOUR[method]), [30])
    fill(cache, [1] * 5, start=30, ends=False)
    twin = CompressedKVCache.from_state(cache.state)
    outs = [fill(c, [1] * 13, start=35, ends=False) for c in (cache, twin)]
    assert mx.array_equal(outs[0], outs[1]) and kept(cache) == kept(twin)


@pytest.mark.parametrize("method", FOUR)
def test_every_sequence_of_a_batch_keeps_its_own_rows(method: str) -> None:
    """Two sequences in one cache keep what each keeps alone (layer-shared sets are shared by heads, not sequences)."""
    both = tensors(60, (2, 2, 8, 8))
    cache = new_cache(**FOUR[method])
    feed(cache, both, [40, *[1] * 20], scale=SCALE)
    for i in range(2):
        alone = new_cache(**FOUR[method])
        feed(alone, Tensors(*(x[i : i + 1] for x in (both.q, both.k, both.v))), [40, *[1] * 20], scale=SCALE)
        mine, its = (np.sort(np.array(c.positions)[j]) for c, j in ((cache, i), (alone, 0)))
        assert np.array_equal(mine, its)


@pytest.mark.parametrize("method", FOUR)
def test_dropped_rows_are_the_only_difference(method: str) -> None:
    """Decode steps in reused slots and a second prompt attend as full attention does where dropped rows are masked.

    Rows that stay are the original ones, bit for bit. float32 sums of at most 48 rows in another order.
    """
    data, at = tensors(48, (2, 2, 8, 8)), 0
    cache = new_cache(**FOUR[method])
    for n in (30, 1, 1, 1, 1, 1, 1, 6, 1, 1):
        visible, stop = np.zeros((2, 4, n, 48), bool), at + n
        for b, heads in enumerate(np.array(mx.broadcast_to(cache.positions, (2, 2, cache.positions.shape[2])))):
            for head, positions in enumerate(heads):
                visible[b, 2 * head : 2 * head + 2, :, positions[positions >= 0]] = True
        visible[..., at:stop] = np.tril(np.ones((n, n), bool))
        out = feed(cache, data.part(at, stop), [n], scale=SCALE)
        q, at = data.q[:, :, at:stop], stop
        want = reference.attention(q, data.k[:, :, :stop], data.v[:, :, :stop], SCALE, mx.array(visible[..., :stop]))
        assert mx.allclose(out, want, rtol=1e-4, atol=1e-5)
    index = mx.broadcast_to(cache.positions, (2, 2, cache.positions.shape[2]))[..., None]
    for rows, original in zip(cache.materialize(), (data.k, data.v), strict=True):
        taken = mx.take_along_axis(original, mx.broadcast_to(mx.maximum(index, 0), rows.shape), axis=2)
        assert mx.array_equal(mx.where(index < 0, 0, rows), mx.where(index < 0, 0, taken))


@pytest.mark.parametrize("method", FOUR)
@pytest.mark.parametrize(
    "packing",
    [
        {"method": "kivi", "bit_width_inlier": 8, "residual_length": 0},
        {"method": "turboquant_rvq", "bit_width_inlier": 4},
    ],
    ids=lambda p: p["method"],
)
def test_packed_rows(method: str, packing: dict[str, Any]) -> None:
    """Rows that stay are packed; dropped ones are hidden for a while. What is left is what float rows would leave.

    Packed keys are off by about 2 %, so that a few rows of close scores may be chosen otherwise: 9 of 10 must agree.
    """
    layer = LayerInfo(head_dim=64, value_dim=64)
    fields: dict[str, Any] = FOUR[method] | {f"{method}_budget": 40}
    config = KVCacheConfig(head_dim=64, **fields)
    plain = CompressedKVCache(config, layer)
    packed = CompressedKVCache(config, layer, KVCacheConfig(head_dim=64, **packing))
    data, at = tensors(300), 0
    for chunks in ([199, 1], [1] * 15, [29, 1], [1] * 25):
        for cache in (plain, packed):
            feed(cache, data.part(at, at + sum(chunks)), chunks)
        at += sum(chunks)
        assert plain._store.live == packed._store.live == 40 and packed._store.sealed
        for mine, its in zip(kept(plain), kept(packed), strict=True):
            assert len(its) == 40 and its[-1] == at - 1 and len(set(mine) & set(its)) >= 36


@pytest.mark.parametrize("method", FOUR)
def test_a_second_prompt_is_cut_to_the_budget(method: str) -> None:
    fill(cache := new_cache(**FOUR[method]), [20])
    budget = len(kept(cache)[0])
    fill(cache, [1, 1, 1], start=20, ends=False)
    fill(cache, [15, 1], start=23, ends=False)
    assert all(len(head) == budget and head[-1] == 38 for head in kept(cache)) and cache.offset == 39


OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "h2o_n_sink": (H2O, 4),
    "h2o_grace": (H2O, 1),
    "h2o_decay": (H2O, 0.5),
    "tova_n_sink": (TOVA, 4),
    "keyformer_n_sink": (KEYFORMER | {"keyformer_tau": 0.1}, 5),
    "keyformer_recent": (KEYFORMER, 1),
    "keyformer_tau": (KEYFORMER, 0.1),
    "morphkv_n_sink": (MORPH, 4),
    "morphkv_window": (MORPH, 4),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_what_is_kept(name: str) -> None:
    fields, value = OPTIONS[name]
    fill(base := new_cache(**fields), [48])
    fill(other := new_cache(**fields | {name: value}), [48])
    assert kept(base) != kept(other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "h2o", "h2o_grace": 508}, "h2o_budget=512"),
        ({"method": "h2o", "h2o_decay": 0.0}, "h2o_decay=0.0"),
        ({"method": "tova", "tova_budget": 5}, "tova_budget=5"),
        ({"method": "tova", "tova_budget": 1}, "tova_budget=1"),
        ({"method": "keyformer", "keyformer_budget": 5}, "keyformer_budget=5"),
        ({"method": "keyformer", "keyformer_tau": -1.0}, "keyformer_tau=-1.0"),
        ({"method": "keyformer", "keyformer_tau_init": 0.0}, "keyformer_tau_init=0.0"),
        ({"method": "morphkv", "morphkv_window": 508}, "morphkv_budget=512"),
        *(({"method": m, "capacity": 100}, "capacity=100") for m in FOUR),
    ],
    ids=str,
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizerConfigError, match=message):
        KVCacheFactory.create(KVCacheConfig(**fields))


def test_no_metal_kernel() -> None:
    with pytest.raises(KernelUnavailableError, match="tova_backend='metal'"):
        KVCacheFactory.create(KVCacheConfig(method="tova", tova_backend="metal"))


def test_tova_reference_scores_decoded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The back ends go different ways to the same rows."""
    calls: list[bool] = []
    original = observed.over_queries
    monkeypatch.setattr(observed, "over_queries", lambda *a, **k: calls.append(k["decoded"]) or original(*a, **k))
    for backend in ("auto", "mlx", "reference"):
        fields: dict[str, Any] = TOVA | {"tova_backend": backend}
        fill(new_cache(**fields), [48])
    assert calls == [False, False, True]
