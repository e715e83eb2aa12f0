"""h2o, tova, keyformer and morphkv against the golden sets and decode traces of their specifications."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import fixture
from tests.fixture import DATA, SCALE, fill, kept, new_cache
from tests.matrix import Tensors, feed, split, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.store import Store
from veloxquant_mlx.core.exceptions import KernelUnavailableError, QuantizerConfigError
from veloxquant_mlx.core.types import LayerInfo, Recipe, Stream
from veloxquant_mlx.policies import observed
from veloxquant_mlx.policies.gumbel import NoisyAttention, noise, stream
from veloxquant_mlx.policies.observed import LastQuery, RecentCorrelation, SummedAttention
from veloxquant_mlx.policies.scores import Score, Step

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


# --------------------------------------------------------------------------------------------------- scores as parts


def watched(
    score: Score, data: Tensors = DATA, chunks: list[int] | None = None, sinks: mx.array | None = None
) -> Store:
    """A store that holds everything, and what ``score`` remembers of it."""
    store, at = Store(Recipe(Stream(), Stream())), 0
    for n in chunks or [data.k.shape[2]]:
        now = data.part(at, at + n)
        store.append(now.k, now.v, at)
        at += n
        score.observe(store, Step(now.q, SCALE, sinks, at, True))
    return store


def scores(score: Score, sinks: mx.array | None = None, **more: Any) -> np.ndarray:
    """``(H | 1, n)`` after everything was seen."""
    return np.array(score.score(watched(score, sinks=sinks, **more), SCALE, sinks)[0])


SUMS = {
    "attention": (SummedAttention(), fixture.group_mean(fixture.A.sum(axis=1))),
    "decay": (
        SummedAttention(0.9),
        fixture.group_mean((fixture.A * 0.9 ** np.arange(47, -1, -1)[:, None]).sum(axis=1)),
    ),
    "noise": (
        NoisyAttention(words=stream(5, 2), tau_init=0.7),
        None,
    ),
}


@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("scratch", [1, 4 * 4 * 48 * 10, 64 << 20])
def test_sums_by_chunk_and_by_tile(case: str, chunks: list[int], scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 float32 weights of size 1 at most are added in another order: 48 * 2^-24 each way, with a margin of 3."""
    score, want = SUMS[case]
    want = scores(score) if want is None else want
    monkeypatch.setattr(observed, "SCRATCH", scratch)
    got = scores(score, chunks=chunks)
    assert np.allclose(got, want, rtol=0, atol=1e-5)
    if score.decay == 1:  # every query hands out weights that sum to 1
        assert np.allclose(got.sum(axis=-1), 48, atol=1e-4)


def test_tiles_hold_as_many_queries_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 query heads and 48 rows of float32: 768 bytes a query."""
    seen: list[int] = []
    monkeypatch.setattr(observed, "SCRATCH", 10 * 768 + 767)
    original = SummedAttention.weights
    monkeypatch.setattr(
        SummedAttention,
        "weights",
        lambda self, store, z, *rest: seen.append(z.shape[3]) or original(self, store, z, *rest),
    )
    watched(SummedAttention())
    assert seen == [10, 10, 10, 10, 8]


def test_sums_by_reader_count() -> None:
    """A press that divides by the number of queries that saw a row, and protects nothing, keeps these."""
    score = scores(SummedAttention()) / (48 - np.arange(48))
    assert fixture.top(score, 12) == [
        [0, 1, 2, 3, 5, 6, 7, 8, 9, 16, 20, 22],
        [0, 1, 3, 4, 5, 11, 13, 14, 18, 19, 22, 43],
    ]


def test_last_query_without_a_protected_newest_row() -> None:
    assert fixture.top(scores(LastQuery()), 12) == [[0, 3, 5, 11, 15, 17, 21, 22, 26, 31, 41, 43]]


def test_recent_correlation_fused_by_the_largest() -> None:
    assert fixture.top(scores(RecentCorrelation(8, "max")), 16, range(40, 48)) == [
        [1, 3, 8, 9, 20, 23, 32, 38, *range(40, 48)],
        [3, 11, 12, 13, 18, 22, 26, 31, *range(40, 48)],
    ]


def test_recent_correlation_of_one_query_is_the_last_query_per_head() -> None:
    """Over the older rows alone: the same order as with all rows."""
    score = scores(RecentCorrelation(1))
    want = fixture.group_mean(fixture.softmax(fixture.Z[:, 47, :47]))
    assert np.allclose(score[:, :47], want, atol=1e-6) and not score[:, 47].any()


def test_recent_correlation_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    for fusion in ("sum", "max"):
        want = scores(RecentCorrelation(8, fusion))
        with monkeypatch.context() as patch:
            patch.setattr(observed, "SCRATCH", 3 * 768)
            assert np.allclose(scores(RecentCorrelation(8, fusion)), want, atol=1e-6)


ALL = {
    "summed": SummedAttention(0.98),
    "noisy": NoisyAttention(words=stream(0, 0), tau_init=2.0),
    "last": LastQuery(),
    "recent": RecentCorrelation(8),
}


@pytest.mark.parametrize("case", ALL)
def test_learned_sinks_take_their_share(case: str) -> None:
    """Sinks so large that nothing is left; sinks of minus infinity change nothing."""
    score = ALL[case]
    free = scores(score)
    assert scores(score, sinks=mx.full(4, 80.0)).max() < 1e-6 * free.max()
    assert np.allclose(scores(score, sinks=mx.full(4, -1e30)), free, atol=1e-6)


def test_learned_sinks_are_those_of_the_attention() -> None:
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    z = np.concatenate([fixture.Z, np.broadcast_to(sinks[:, None, None], (4, 48, 1))], axis=-1)
    want = fixture.softmax(z)[..., :48]
    given = mx.array(sinks.astype(np.float32))
    assert np.allclose(scores(SummedAttention(), given), fixture.group_mean(want.sum(axis=1)), atol=1e-5)
    assert np.allclose(scores(LastQuery(), given)[0], want[:, 47].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("case", ALL)
def test_holes_and_the_order_of_rows_do_not_count(case: str) -> None:
    """A row that was dropped and is still there changes no score of the others; shuffled rows, shuffled scores."""
    score = ALL[case]
    order = np.random.default_rng(0).permutation(47)
    index = np.concatenate([order[order != 20], [47]])
    found = []
    for rows, holes in ((index, []), (np.concatenate([order, [47]]), np.flatnonzero(order == 20))):
        store = Store(Recipe(Stream(), Stream()))
        store.append(DATA.k[:, :, rows.tolist()], DATA.v[:, :, rows.tolist()], 0)
        positions = rows.copy()
        positions[holes] = -1
        store.positions, store.holes = mx.array(positions.astype(np.int32))[None, None], len(holes) > 0
        score.observe(store, Step(DATA.q[:, :, 40:], SCALE, None, 48, True))
        found.append(np.delete(np.array(score.score(store, SCALE, None)[0]), holes, axis=-1))
    assert np.allclose(*found, rtol=1e-5, atol=1e-6)
    inorder = Store(Recipe(Stream(), Stream()))
    inorder.append(DATA.k, DATA.v, 0)
    keep = mx.array(np.sort(index).astype(np.int32))[None, None]
    inorder.keep(keep)
    score.observe(inorder, Step(DATA.q[:, :, 40:], SCALE, None, 48, True))
    want = np.array(score.score(inorder, SCALE, None)[0])
    assert np.allclose(found[0], want[:, np.argsort(np.argsort(index))], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("method", ["kivi", "turboquant_rvq"])
def test_packed_rows_are_scored_as_they_are_stored(case: str, method: str) -> None:
    """The scores of the decoded rows, without decoding them here; float32 products in another order."""
    data = tensors(140, repeats=2)
    cache = CompressedKVCache(KVCacheConfig(method=method, head_dim=64, bit_width_inlier=4))  # type: ignore[arg-type]
    feed(cache, data, [140])
    keys, values = cache.materialize()
    plain = Store(Recipe(Stream(), Stream()))
    plain.append(keys, values, 0)
    found = []
    for store in (cache._store, plain):
        ALL[case].observe(store, Step(data.q, 0.125, None, 140, True))
        found.append(np.array(ALL[case].score(store, 0.125, None)))
    assert cache._store.sealed and np.allclose(*found, rtol=1e-3, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- noise


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
        fill(cache := new_cache(layer=layer, **FOUR["keyformer"]), [48])
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
        fill(cache := new_cache(**KEYFORMER | {"keyformer_recent": 1} | moving | more), [20])
        fill(cache, [1] * 28, start=20, ends=False)
        sets.append(kept(cache))
    assert sets[0] != sets[1] and sets[1] == sets[2] and sets[0] != sets[3]


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


def test_morphkv_remembers_no_choice() -> None:
    """Rows that another history left behind, under the same last queries: the same rows go."""
    score, rows = RecentCorrelation(8), [*range(3, 13), *range(32, 40)]
    found = []
    for chunks in ([40], [20, 20], [39, 1]):
        store = watched(score, DATA.part(0, 40), chunks)
        store.keep(mx.array(rows)[None, None])
        found.append(np.array(score.score(store, SCALE, None)))
    assert np.allclose(found[0], found[1], atol=1e-6) and np.allclose(found[0], found[2], atol=1e-6)


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
