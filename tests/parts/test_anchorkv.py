"""anchorkv: budgets to the byte, exact anchors, least squares, worth of residuals, one choice for all chunkings."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.formulas_anchorkv import anchorkv
from tests.matrix import Row, Tensors, feed, same_state, tensors
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.codecs.anchors import KEYS, VALUES, AnchorResiduals, Plan, factors, owners
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.models.rope import Rotation
from veloxquant_mlx.policies.anchors import AnchorChoice, chosen, utilities

PAPER = Plan(0.05, 32, 1 / 128, 2, (128, 128))
SMALL: dict[str, Any] = {"anchorkv_theta": 0.3, "anchorkv_window": 16, "anchorkv_anchor_frac": 0.1}
ROW = Row("anchorkv", "anchorkv", anchorkv(0.3, 16, 0.1), SMALL)
N = 320


@cache
def rope(dim: int = 64) -> Rotation:
    half = np.arange(dim // 2)
    rate = 10000.0 ** (-2 * half / dim)
    return Rotation(np.concatenate([half + dim // 2, half]).astype(np.int32), np.concatenate([-rate, rate]))


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def compressed(data: Tensors, rotation: Rotation | None = None, **fields: Any) -> CompressedKVCache:
    """After a prompt in three calls."""
    n, made = data.k.shape[2], ROW.cache(rope=rotation, **fields)
    feed(made, data, [n // 2, n - n // 2 - 1, 1])
    return made


def codes(made: CompressedKVCache, side: str = "keys") -> dict[str, mx.array]:
    block = getattr(made.store, side).prompt
    assert block is not None and block.n
    return block.codes


@pytest.mark.parametrize(
    ("n", "anchors", "base", "residuals"),
    [(1024, 32, 22_592, 106), (4096, 32, 41_792, 1854), (8192, 64, 83_584, 3709), (32768, 256, 334_336, 14_838)],
)
def test_golden_budgets(n: int, anchors: int, base: int, residuals: int) -> None:
    """Bytes per head. The published budgets do not count which tokens are anchors: 4 bytes for each that is not new."""
    places = 4 * (anchors - 32)
    assert PAPER.anchors(n) == anchors and PAPER.base(n) == base + places
    assert PAPER.base(n) + 34 * residuals <= 0.05 * 2 * n * 2 * 128 + places
    ours = residuals - -(-places // 34)
    assert ours <= sum(PAPER.slots(n, 1)) <= residuals - places // 34
    keys, values = PAPER.slots(n, 1)
    assert keys == (keys + values) // 2


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("n", [1024, 4096, 5000, 8192, 40_000, 100_000])
def test_the_budget_is_hard(n: int, heads: int) -> None:
    """Never a byte more, and not room for two residuals left, all heads together."""
    budget = 0.05 * heads * n * 2 * 256
    held = heads * PAPER.base(n) + 34 * sum(PAPER.slots(n, heads))
    assert budget - 68 < held <= budget


def test_budget_of_a_cache_to_the_byte() -> None:
    """Float16 rows of 4096 tokens, two heads."""
    data = tensors(4096, (1, 2, 128, 128), dtype=mx.float16)
    made = CompressedKVCache(KVCacheConfig(method="anchorkv"), LayerInfo())
    made.update_and_fetch(data.k, data.v)
    made.attend(data.q[:, :, -32:], scale=0.09)
    made.end_prefill()
    held = made.held_bytes()
    assert held["window"] == held["index"] == 0
    budget = 0.05 * 2 * 4096 * 2 * 256
    assert budget - 68 < held["packed"] <= budget
    assert held["packed"] == anchorkv(0.05, 32, 1 / 128)(4096, (1, 2, 128, 128), 2)
    assert codes(made)["words"].shape[2] + codes(made, "values")["words"].shape[2] == 2 * 1854 + 1  # pooled: .87 twice


def test_too_small_a_budget_is_reported() -> None:
    """Anchors and factors alone are more than 5 % of 300 tokens: no residuals, and the receipt says where it holds."""
    made = compressed(tensors(300), anchorkv_theta=0.05)
    assert "words" not in codes(made) and "slots" not in codes(made)
    assert "shorter ones are anchors and factors" in made.describe()["notes"][-1]
    least = PAPER.least()
    assert least is not None
    for n, fits in ((least, True), (least - 1, False)):
        assert (PAPER.base(n) <= 0.05 * n * 512) == fits
    assert Plan(0.01, 32, 1 / 128, 2, (32, 32)).least() is None


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_anchors_are_exact(dtype: mx.Dtype) -> None:
    """Keys are derotated to serve as anchors, and held as they came."""
    data = tensors(N, dtype=dtype)
    made = compressed(data, rope())
    for got, want, side in zip(made.materialize(), (data.k, data.v), ("keys", "values"), strict=True):
        held = codes(made, side)
        assert held["anchors"].dtype == dtype and held["places"].shape[2] == 16
        same = (got == want).all(axis=-1)
        assert same[..., -16:].all() and (same.sum(axis=-1) == 32).all()
        assert mx.take_along_axis(same, held["places"].astype(mx.int32), axis=-1).all()


def test_factors_are_least_squares() -> None:
    """``<r, a> = 0`` and ``|r|^2 = |x|^2 (1 - cos^2)``, to the rounding of a float16 factor (2^-11)."""
    x, anchors = normal(1, 2, 200, 64), normal(1, 2, 9, 64, seed=1)
    owner = owners(x, anchors)
    own = mx.take_along_axis(anchors, mx.broadcast_to(owner[..., None], x.shape), axis=2)
    gamma = factors(x, own).astype(mx.float32)
    left = x - gamma[..., None] * own
    size = mx.sqrt(mx.square(x).sum(-1) * mx.square(own).sum(-1))
    assert mx.all(mx.abs((left * own).sum(-1)) <= 1e-3 * size)
    cosine = (x * own).sum(-1) / size
    energy = mx.square(x).sum(-1)
    assert mx.allclose(mx.square(left).sum(-1), energy * (1 - cosine**2), rtol=1e-5)  # second order in the rounding
    every = mx.abs(x @ anchors.swapaxes(-1, -2)) / mx.sqrt(mx.square(anchors).sum(-1))[:, :, None]
    assert mx.array_equal(owner, mx.argmax(every, axis=-1))
    assert mx.any(gamma < 0)  # the sign matters


def test_isotropic_rows_have_no_good_anchor() -> None:
    """The largest of 64 |cos| at D = 128 is about .23."""
    x, anchors = normal(1, 1, 2000, 128), normal(1, 1, 64, 128, seed=1)
    own = mx.take_along_axis(anchors, mx.broadcast_to(owners(x, anchors)[..., None], x.shape), axis=2)
    cosine = mx.abs((x * own).sum(-1)) / mx.sqrt(mx.square(x).sum(-1) * mx.square(own).sum(-1))
    assert float(cosine.mean()) == pytest.approx(0.23, abs=0.01)


def test_tiny_anchors_serve_nobody() -> None:
    x = normal(1, 1, 50, 64)
    anchors = mx.concatenate([1e-6 * x[:, :, :1], normal(1, 1, 2, 64, seed=1)], axis=2)
    assert owners(x, anchors)[0, 0, 0] != 0
    assert mx.all(factors(x, 1e-6 * x) == 0)


def test_utilities_by_their_definition() -> None:
    g, m, n, d = 2, 3, 20, 16
    q, k, v, r, rv = (normal(1, 1, rows, d, seed=i) for i, rows in enumerate((g * m, n, n, n, n)))
    alpha = mx.softmax(q @ k.swapaxes(-1, -2), axis=-1) * (mx.arange(n) != 7)
    out = alpha @ v
    u_k, u_v = utilities(alpha.reshape(1, 1, g, m, n), q, out, r, v, rv)
    a, q0, v0, r0, rv0, y = (np.array(x)[0, 0].astype(np.float64) for x in (alpha, q, v, r, rv, out))
    far = np.square(v0[None] - y[:, None]).sum(-1)
    # where one row gets nearly all attention, y is v but for a difference of float32 squares
    assert np.allclose(u_k[0, 0], (a**2 * (q0 @ r0.T) ** 2 * far).mean(0), rtol=1e-4, atol=1e-4)
    assert np.allclose(u_v[0, 0], (a**2).mean(0) * np.square(rv0).sum(-1), rtol=1e-5)
    assert u_k[0, 0, 7] == u_v[0, 0, 7] == 0  # nobody attends to it
    assert chosen(mx.array([[[1.0, 3.0, 2.0], [5.0, 3.0, 0.0]]]), 3).tolist() == [[[0, 1, 0], [1, 1, 0]]]


def test_anchors_by_score_and_evenly_spread() -> None:
    """16 newest; of 16 more, 11 by score (.7 rounded) and 5 in the middles of fifths of the rows left."""
    guide = AnchorChoice(Plan(0.3, 16, 0.1, 2, (64, 64)), 0.7)
    score = normal(1, 2, N)
    found = np.array(guide._anchors(score))
    for head in range(2):
        best = set(np.argsort(-np.array(score[0, head, :-16]))[:11].tolist())
        rest = [i for i in range(N - 16) if i not in best]
        even = {rest[(2 * i + 1) * len(rest) // 10] for i in range(5)}
        assert found[0, head].tolist() == [*sorted(best | even), *range(N - 16, N)]


@pytest.mark.parametrize("rotation", [None, rope()], ids=["plain", "rope"])
def test_rows_and_products(rotation: Rotation | None) -> None:
    """Others are multiples of their anchor, plus a residual where one is held; any span decodes to the same rows."""
    data = tensors(N)
    made = compressed(data, rotation)
    store, q, p = made.store, normal(1, 2, 3, 64), mx.softmax(normal(1, 2, 3, N), axis=-1)
    keys, values = (s.dense(dtype=mx.float32) for s in (store.keys, store.values))
    assert mx.array_equal(store.keys.dense(37, 181), keys[:, :, 37:181])
    # float32 sums in another order
    assert mx.allclose(store.keys.scores(q), q @ keys.swapaxes(-1, -2), rtol=1e-4, atol=1e-4)
    assert mx.allclose(store.values.mix(p), p @ values, rtol=1e-4, atol=1e-5)
    where = mx.arange(N, dtype=mx.int32)[None, None]
    for got, want, side, turn in ((keys, data.k, "keys", rotation), (values, data.v, "values", None)):
        held = codes(made, side)
        x, y = (a if turn is None else turn.turn(a, -where) for a in (want, got))
        bits = np.unpackbits(np.array(held["slots"]).view(np.uint8), axis=-1, bitorder="little").astype(bool)[..., :N]
        assert bits.sum() == held["words"].shape[2] == held["rms"].shape[2]
        left = np.array(mx.square(x - y).sum(-1) / mx.square(x).sum(-1))
        exact = left < 1e-10
        cosine = np.array(owners(x, _anchors(x, held)))
        own = np.take_along_axis(np.array(_anchors(x, held)), cosine[..., None], axis=2)
        square = (np.array(x) * own).sum(-1) ** 2 / (np.array(x) ** 2).sum(-1) / (own**2).sum(-1)
        alone = ~bits & ~exact
        assert np.allclose(left[alone], 1 - square[alone], rtol=1e-3)
        # 2 bits: MSE .1175 of the residual on normal numbers; of single rows less than twice that
        assert np.all(left[bits] < 2 * 0.1175 * (1 - square[bits]) + 1e-3)
        assert np.mean(left[bits] / (1 - square[bits])) == pytest.approx(0.1175, rel=0.1)


def _anchors(x: mx.array, held: dict[str, mx.array]) -> mx.array:
    index = mx.concatenate(
        [held["places"].astype(mx.int32), mx.broadcast_to(mx.arange(N - 16, N), (1, 2, 16))], axis=-1
    )
    return mx.take_along_axis(x, mx.broadcast_to(index[..., None].astype(mx.int32), (1, 2, 32, 64)), axis=2)


def test_error_falls_with_theta() -> None:
    """Of the last queries' outputs: not larger with more residuals (measured .84, .49, .30, .25 of their size)."""
    data, errors = tensors(N), []
    q = data.q[:, :, -16:]
    for theta in (0.12, 0.15, 0.2, 0.25, 1.0):
        made = compressed(data, rope(), anchorkv_theta=theta)
        keys, values = (mx.repeat(x, 2, axis=1) for x in made.materialize())
        exact = mx.fast.scaled_dot_product_attention(
            q, mx.repeat(data.k, 2, axis=1), mx.repeat(data.v, 2, axis=1), scale=0.125, mask="causal"
        )
        got = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125, mask="causal")
        errors.append(float(mx.square(got - exact).sum() / mx.square(exact).sum()))
    assert errors == sorted(errors, reverse=True)


def test_decoded_tokens_and_a_second_prompt_stay_exact() -> None:
    data = tensors(N + 100)
    made = compressed(data.part(0, N), rope())
    feed(made, data.part(N, N + 100), [1, 1, 97, 1])
    for got, want in zip(made.materialize(), (data.k, data.v), strict=True):
        assert mx.array_equal(got[:, :, N:], want[:, :, N:])
    assert made.store.keys.n_sealed == N and not made.store.aux and not made.store.row_aux


def test_trim() -> None:
    """Exact among later tokens; inside the prompt its surviving rows stay as they decode."""
    data = tensors(N + 20)
    made = compressed(data.part(0, N), rope())
    before = made.materialize()[0]
    feed(made, data.part(N, N + 20), [1] * 20)
    made.trim(20)
    assert made.store.keys.n_sealed == N
    made.trim(100)
    assert made.store.keys.n_sealed == 0 and mx.array_equal(made.materialize()[0], before[:, :, : N - 100])
    made.trim(N)
    feed(made, data.part(0, N), [N - 1, 1])
    assert made.store.keys.n_sealed == N  # a new first prompt


def test_seed_and_bits() -> None:
    """One bit is the sign at .798; another seed rotates residuals otherwise."""
    data = tensors(N)
    one, again, other = (compressed(data, anchorkv_seed=s, anchorkv_residual_bits=1) for s in (42, 42, 7))
    assert same_state(one, again) and not same_state(one, other)
    codec = AnchorResiduals(Plan(0.3, 16, 0.1, 1, (64, 64)), KEYS, 42)
    assert np.allclose(
        np.abs(
            np.array(
                codec.residuals.codec.decode(
                    {  # type: ignore[attr-defined]
                        "words": mx.array([[[[5, 9]]]], mx.uint32),
                        "rms": mx.ones((1, 1, 1), mx.float16),
                    }
                )
            )
        ),
        0.7979,
        atol=1e-4,
    )
    assert VALUES == 1 and codes(one)["words"].shape[-1] == 2


def test_rho_window_and_fraction() -> None:
    """rho says who the older anchors are, window and fraction how many there are."""
    data = tensors(N)
    places = [np.array(codes(compressed(data, anchorkv_rho=rho))["places"]) for rho in (0.0, 1.0)]
    assert not np.array_equal(places[0], places[1])
    for window, fraction, count in ((16, 0.1, 32), (40, 0.1, 40), (16, 0.2, 64)):
        fields = {"anchorkv_window": window, "anchorkv_anchor_frac": fraction}
        assert codes(compressed(data, **fields))["anchors"].shape[2] == count
    short = compressed(tensors(16))
    assert codes(short).keys() == {"anchors"}  # nothing is compressed


def test_after_rows_were_dropped() -> None:
    """Every head has rows of its own, whose positions are held and count: 5 % of the 1500 rows that stay."""
    data = tensors(1600, (1, 2, 128, 128), dtype=mx.float16)
    dropping = KVCacheConfig(method="snapkv", snap_budget=1500, snap_obs_window=32)
    made = CompressedKVCache(dropping, LayerInfo(rope=rope(128)), KVCacheConfig(method="anchorkv"))
    feed(made, data, [1599, 1])
    held = codes(made)
    assert mx.array_equal(held["positions"], made.positions)
    budget = 0.05 * 2 * 1500 * 2 * 256
    assert budget - 68 < made.held_bytes()["packed"] <= budget
    index = mx.broadcast_to(made.positions[..., None], (1, 2, 1500, 128))
    same = (made.materialize()[0] == mx.take_along_axis(data.k, index, axis=2)).all(axis=-1)
    assert (same.sum(axis=-1) >= 32).all()
