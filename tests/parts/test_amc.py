"""amc: counts of tiers, thresholds that stay, room per segment, what each tier keeps, and the options."""

from __future__ import annotations

from math import log
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import Tensors, feed, tensors
from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.registry import method
from veloxquant_mlx.calibrate import collect, fit_artifact
from veloxquant_mlx.codecs.packing import unpack
from veloxquant_mlx.codecs.ranks import HIGH, LOW, MID, Coordinates, RankTiers, magnitudes, ranked, tier_counts
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.policies.magnitude import Adaptive, MagnitudeTiers


def gaussian(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def cache(dim: int = 64, **fields: Any) -> CompressedKVCache:
    return CompressedKVCache(KVCacheConfig(method="amc", **fields), LayerInfo(head_dim=dim, value_dim=dim))


def fitted(x: mx.array, segment: int = 0, shares: tuple[float, float] = (0.2, 0.3), group: int = 32) -> Any:
    codec = RankTiers(shares, group, dim=x.shape[-1], segment=segment, fit_rows=1)
    return codec.bind(codec.fit(x))


def tiers_of(c: CompressedKVCache, part: str = "keys") -> tuple[np.ndarray, np.ndarray]:
    """Tiers of the prompt's tokens and of later ones."""
    stream = getattr(c.store, part)
    found = []
    for block in (stream.prompt, stream.packed):
        bits = np.array(unpack(block.codes["tiers"], 2)) if block.n else np.zeros((1, 1, 0), np.uint8)
        found.append(bits[..., : block.n])
    return found[0], found[1]


@pytest.mark.parametrize(("n", "counts"), [(10, (2, 3)), (33, (7, 10)), (100, (20, 30)), (1, (0, 0)), (32, (6, 10))])
def test_tier_counts(n: int, counts: tuple[int, int]) -> None:
    assert tier_counts(n, 0.2, 0.3) == counts
    tiers = np.array(ranked(gaussian(2, 3, n), counts))
    assert (tiers == HIGH).sum(-1).tolist() == [[counts[0]] * 3] * 2
    assert (tiers == MID).sum(-1).tolist() == [[counts[1]] * 3] * 2


def test_bits_of_the_default() -> None:
    """4.28 bits per number at 128, the 2 bits of the tier counted with keys and with values."""
    n, dim = 320, 128
    codec = fitted(gaussian(1, 1, n, dim))
    codes = codec.encode(gaussian(1, 1, n, dim, seed=1))
    assert (codec.mid.rank, codec.low.rank) == (43, 8)
    bits = 8 * sum(a.nbytes for a in codes.values()) / (n * dim)
    want = (0.2 * dim * 16 + 0.3 * (43 * 8 + 16 * 2) + 0.5 * (8 * 4 + 16)) / dim + 2 / dim
    assert bits == pytest.approx(want, abs=1e-9) and want - 1 / dim == pytest.approx(4.28, abs=0.005)


@pytest.mark.parametrize("segment", [0, 32])
@pytest.mark.parametrize("shares", [(0.2, 0.3), (0.0, 0.5), (0.4, 0.6), (0.0, 0.0), (1.0, 0.0)])
@pytest.mark.parametrize("n", [96, 160])
def test_products_are_those_of_the_rows(segment: int, shares: tuple[float, float], n: int) -> None:
    x = gaussian(2, 2, n, 80)
    codec = fitted(x, segment, shares, group=16)
    codes = codec.encode(x)
    rows = codec.rows(codes, 0, n)
    assert mx.array_equal(codec.rows(codes, 37, 75), rows[:, :, 37:75])
    q, p = gaussian(2, 2, 3, 80, seed=1), mx.softmax(gaussian(2, 2, 3, n, seed=2), axis=-1)
    # float32 sums of 80 and of n products, through the axes
    assert mx.allclose(codec.scores(q, codes)[..., :n], q @ rows.swapaxes(-1, -2), rtol=1e-4, atol=1e-4)
    assert mx.allclose(codec.mix(p, codes), p @ rows, rtol=1e-4, atol=1e-5)


def test_what_each_tier_keeps() -> None:
    """High rows are exact in float16; the others lose the energy behind their rank and half a step per number."""
    spread = mx.array((0.8 ** np.arange(128)).astype(np.float32))
    x = gaussian(1, 1, 400, 128) * spread
    codec = fitted(x)
    tiers = ranked(magnitudes(x), tier_counts(400, 0.2, 0.3))
    rows = codec.rows(codec.encode_guided(x, tiers), 0, 400)
    found = np.array(tiers[0, 0])
    high = np.array(x[0, 0])[found == HIGH]
    assert np.array_equal(np.array(rows[0, 0])[found == HIGH], high.astype(np.float16).astype(np.float32))
    z = np.array(x @ codec._fitted["basis"])[0, 0].astype(np.float64)
    square, error = (np.array(mx.square(a).sum(-1))[0, 0] for a in (x, x - rows))
    for tier, part in ((MID, codec.mid), (LOW, codec.low)):
        mine = found == tier
        kept = np.square(z[mine, : part.rank]).sum(-1)
        decoded = np.array(part.decode(*part.encode(mx.array(z[None, None, mine].astype(np.float32)))))[0, 0]
        noise = np.square(decoded - z[mine, : part.rank]).sum(-1)
        # orthogonality of float32 axes: 1e-6 of the energy
        assert np.allclose(error[mine], square[mine] - kept + noise, atol=1e-4 * square.max())
        assert noise.max() < part.rank * (np.abs(z).max() / (2 ** (part.bits - 1) - 1) / 2 * 1.01) ** 2


def test_a_flat_spectrum_loses_nearly_all_in_the_low_tier() -> None:
    """The expected failure: 1 - 8 / 128 of the energy is gone."""
    x = gaussian(1, 1, 8192, 128)
    codec = fitted(x, shares=(0.0, 0.0))
    rows = codec.rows(codec.encode(x), 0, 8192)
    lost = float(mx.square(x - rows).sum() / mx.square(x).sum())
    # the 8 largest of 128 sample eigenvalues of 8192 rows are up to 1.25 times the mean; 4-bit noise is 1 % of 1/16
    assert lost == pytest.approx(1 - 8 / 128, abs=0.015)


def test_coordinates_are_within_half_a_step() -> None:
    z = gaussian(2, 2, 50, 43) * 3
    for bits, group in ((8, 32), (4, 8), (4, 100)):
        part = Coordinates(43, bits, group)
        codes, steps = part.encode(z)
        assert steps.shape[-1] == -(-43 // min(group, 43)) and codes.shape[-1] == -(-43 * bits // 8)
        step = mx.repeat(steps.astype(mx.float32), part.group, axis=-1)[..., :43]
        # the largest number is within half a step too: float16 steps are rounded by 2^-11 of 127 steps
        assert mx.all(mx.abs(part.decode(codes, steps) - z) <= 0.57 * step)


def test_later_tokens_meet_the_thresholds_of_the_prompt() -> None:
    """One token is no quantile of its own: dull ones are all low, and no more are high than there is room for."""
    data = tensors(300 + 64)
    size = np.ones(364, np.float32)
    size[300:332], size[332:] = 0.1, 10.0  # dull, then loud
    k = data.k * mx.array(size)[:, None]
    c = cache()
    feed(c, Tensors(data.q, k, data.v), [299, *[1] * 65])
    prompt, later = tiers_of(c)
    n = prompt.shape[-1]
    assert n == 268 and [(prompt == t).sum(-1).max() for t in (HIGH, MID)] == list(tier_counts(268, 0.2, 0.3))
    assert later.shape[-1] == 64 and later[..., 32:].max() == LOW
    feed(c, tensors(32), [1] * 32)
    loud = tiers_of(c)[1][..., 64:]
    assert [(loud == t).sum(-1).tolist() for t in (HIGH, MID, LOW)] == [[[m] * 2] for m in (6, 10, 16)]
    assert all(np.array_equal(a, b) for a, b in zip(tiers_of(c), tiers_of(c, "values"), strict=True))
    assert np.array_equal(tiers_of(c)[0], prompt)  # a tier never changes


@pytest.mark.parametrize(("shares", "tier"), [((1.0, 0.0), HIGH), ((0.0, 1.0), MID), ((0.0, 0.0), LOW)])
def test_a_tier_of_all_tokens_takes_later_ones_too(shares: tuple[float, float], tier: int) -> None:
    c, data = cache(amc_k_high=shares[0], amc_k_mid=shares[1]), tensors(300)
    feed(c, Tensors(data.q, data.k * mx.where(mx.arange(300) < 200, 1.0, 0.5)[:, None], data.v), [200, *[1] * 100])
    assert all((part == tier).all() and part.size for part in tiers_of(c))


def test_thresholds_follow_the_variance() -> None:
    """The same variance changes nothing; twice as much lowers them by gamma ln 2 = 6.9 %; none at all is finite."""
    x = gaussian(1, 1, 5000)
    rule = Adaptive(0.1, float(mx.var(x)), 64)
    assert rule.factor(x).item() == pytest.approx(1.0, abs=1e-5)
    assert rule.factor(x * 2**0.5).item() == pytest.approx(1 - 0.1 * log(2), abs=1e-5)
    assert 1 < float(np.array(rule.factor(mx.zeros((1, 1, 8))))[0, 0]) < 5


@pytest.mark.parametrize("fields", [{"amc_gamma": 0.4}, {"amc_calib_variance": 1e-4}, {"amc_threshold_window": 300}])
def test_adaptive_options_count(fields: dict[str, Any]) -> None:
    """Each moves tiers of later tokens, whose sizes vary more than those of the prompt."""
    base: dict[str, Any] = {"amc_adaptive_thresholds": True, "amc_calib_variance": 0.2, "amc_gamma": 0.1}
    data = tensors(400)
    size = mx.exp(gaussian(400) * mx.where(mx.arange(400) < 280, 0.2, 0.8))
    data = Tensors(data.q, data.k * size[:, None], data.v)
    found = []
    for more in ({}, fields):
        c = cache(**{**base, **more})
        feed(c, data, [300, *[1] * 100])
        found.append(tiers_of(c)[1])
        assert c.store.aux["guide.recent"].shape[-1] == min(({**base, **more}).get("amc_threshold_window", 64), 364)
    assert not np.array_equal(*found)


def test_windows_of_many_segments() -> None:
    """As many segments as are due at once see the saliencies up to their own end, as one by one."""
    guide = MagnitudeTiers((0.2, 0.3), 4, 1.0, Adaptive(0.1, 1.0, 6))
    x = mx.arange(12.0)[None, None]
    assert guide._windows({}, x)[0, 0].tolist() == [[3, 2, 1, 0, 3, 2], [7, 6, 5, 4, 3, 2], [11, 10, 9, 8, 7, 6]]
    later = guide._windows({"guide.recent": x[..., 2:8]}, x[..., 8:])
    assert later[0, 0].tolist() == [[11, 10, 9, 8, 7, 6]]


def test_queries_take_part() -> None:
    """Keys along the mean query rank higher; alpha = 1 leaves sizes alone."""
    data = tensors(200)
    q, k = mx.broadcast_to(mx.ones(64), data.q.shape), data.k
    k = k + mx.where(mx.arange(200) % 10 == 0, 2.0, -2.0)[:, None] * mx.ones(64)  # both ways alike in size
    found = {}
    for alpha in (0.0, 1.0, None):
        fields: dict[str, Any] = {} if alpha is None else {"amc_use_query_saliency": True, "amc_query_alpha": alpha}
        c = cache(amc_k_high=0.1, **fields)
        assert c.needs_queries == (alpha == 0.0)
        feed(c, Tensors(q, k, data.v), [199, 1])
        found[alpha] = tiers_of(c)[0][0, 0]
    assert np.array_equal(found[1.0], found[None]) and not np.array_equal(found[0.0], found[1.0])
    assert (np.flatnonzero(found[0.0] == HIGH) % 10 == 0).all()


def test_a_short_prompt_waits_and_a_fit_is_where_it_is_said() -> None:
    c = cache()
    feed(c, tensors(50), [49, 1])
    assert not c.store.sealed
    feed(c, tensors(60), [1] * 60)
    prompt, later = tiers_of(c)
    assert prompt.shape[-1] == 0 and later.shape[-1] == 64
    bases = []
    for calib, tokens in ((64, 200), (64, 100), (None, 200)):
        c, data = cache(n_calib_tokens=calib), tensors(200)
        feed(c, data.part(0, tokens), [tokens - 1, 1])
        assert c.store.keys.packed is not None
        bases.append(c.store.keys.packed.fitted["basis"])
    assert mx.array_equal(bases[0], bases[1]) and not mx.array_equal(bases[0], bases[2])


def test_axes_of_an_artifact() -> None:
    """Nothing is fitted, so a prompt of any length is ranked; the axes are those of the text it was made on."""
    model = tiny.build("llama")
    text: Any = tiny.tokens(100)[0].tolist()
    store, told = fit_artifact(model, [text], "amc")
    assert told == [] and store.layer(0)["k_basis"].shape == (2, 16, 5)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="amc", store=store))
    mx.eval(model(mx.array([text[:40]]), cache=caches), model(mx.array([text[40:41]]), cache=caches))
    assert caches[0].store.keys.n_sealed == 41 - 32 and not caches[0].store.keys.packed.fitted
    assert caches[0].describe()["notes"] == ["axes from the calibration artifact"]
    sample = collect(model, [text], ("keys",), limit=100)[0]
    codec = RankTiers((0.0, 0.0), 32, dim=16, fit_rows=1)
    assert mx.allclose(codec.fit(sample.parts["keys"][None])["basis"][0], store.layer(0)["k_basis"], atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"amc_k_high": 0.6, "amc_k_mid": 0.5}, "amc_k_mid"),
        ({"amc_k_high": -0.1}, "amc_k_high"),
        ({"amc_adaptive_thresholds": True}, "amc_calib_variance"),
        ({"amc_threshold_window": 1}, "amc_threshold_window"),
        ({"amc_query_alpha": 1.5}, "amc_query_alpha"),
        ({"amc_group_size": 0}, "amc_group_size"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizerConfigError, match=message):
        method("amc").check(KVCacheConfig(method="amc", **fields))
