"""vecinfer: smoothing and rotation, codebooks of every shape and origin, tables, and the artifact."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import feed, tensors
from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.artifacts import CalibrationArtifact
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.registry import method
from veloxquant_mlx.calibrate import collect, fit_artifact
from veloxquant_mlx.calibrate.vecinfer import vecinfer_codebooks
from veloxquant_mlx.codecs import vectors
from veloxquant_mlx.codecs.base import Codec
from veloxquant_mlx.codecs.vectors import ProductVectors, normal_codebook, refined, smoothing
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.transforms.hadamard import BlockHadamard


def gaussian(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def codec(bits: int, sub: int, dim: int, keys: bool = True, **more: Any) -> ProductVectors:
    return ProductVectors(bits, sub, BlockHadamard(dim), dim=dim, channels=keys, fit_rows=1, **more)


def fitted(c: ProductVectors, x: mx.array) -> ProductVectors:
    return c.bind(c.fit(x))


def relative(c: Codec, x: mx.array) -> float:
    return float(mx.square(c.decode(c.encode(x)) - x).sum() / mx.square(x).sum())


def cache(**fields: Any) -> CompressedKVCache:
    small: dict[str, Any] = {"key_codebook_bits": 8, "key_sub_dim": 8, "residual_length": 32}
    return CompressedKVCache(
        KVCacheConfig(**{"method": "vecinfer", **small, **fields}), LayerInfo(head_dim=64, value_dim=64)
    )


@pytest.mark.parametrize("dim", [64, 96, 80, 112, 7])
def test_block_hadamard_keeps_products(dim: int) -> None:
    """``<q lambda H, k / lambda H> = <q, k>`` to 1e-5 of their lengths: float32 sums of a row."""
    turn, q, k = BlockHadamard(dim), gaussian(50, dim), gaussian(50, dim, seed=1)
    factors = mx.exp(2 * gaussian(dim, seed=2))
    got = (turn.on_query(q * factors) * turn.forward(k / factors)).sum(-1)
    limit = 1e-5 * mx.linalg.norm(q * factors, axis=-1) * mx.linalg.norm(k / factors, axis=-1)
    assert mx.all(mx.abs(got - (q * k).sum(-1)) <= limit)
    assert mx.allclose(turn.inverse(turn.forward(k)), k, atol=1e-5)


@pytest.mark.parametrize(("bits", "sub", "want"), [(12, 4, 0.0269), (8, 8, 0.3255)])
def test_errors_on_normal_numbers(bits: int, sub: int, want: float) -> None:
    """The shipped codebooks, as in the table of section 1.9 (its other rows: test_product.py), on other vectors.

    16384 of them: 3 %.
    """
    x = gaussian(1, 1, (1 << 14) * sub // 64, 64, seed=9)
    assert relative(codec(bits, sub, 64, keys=False, book=normal_codebook(bits, sub)), x) == pytest.approx(
        want, rel=0.03
    )


def test_bits_of_the_default() -> None:
    """3 bits per key number and 1 per value, nothing per token; 32 and 4 KiB of codebooks."""
    recipe = method("vecinfer").recipe(KVCacheConfig(method="vecinfer"), LayerInfo(kv_heads=1))
    for stream, bits in ((recipe.keys, 3), (recipe.values, 1)):
        assert isinstance(stream.codec, ProductVectors) and stream.codec._book.nbytes == {3: 32, 1: 4}[bits] << 10
        bound = fitted(stream.codec, gaussian(1, 1, 64, 128))
        assert sum(a.nbytes for a in bound.encode(gaussian(1, 1, 32, 128)).values()) * 8 == bits * 32 * 128


def test_ablation_of_scaled_channels() -> None:
    """Keys with a channel x50 and one x20, shared codebook d4 b8 of these keys: 1.1 % of the energy is lost with both.

    Half of what each alone loses, or less. (The specification has .0256, .0297 and .0129 for neither and each: they
    depend on where k-means begins; ours begins at normal vectors, which single channels do not pull far.)
    """
    rng = np.random.default_rng(0)
    k = rng.standard_normal((8192, 128)).astype(np.float32)
    k[:, 5] *= 50
    k[:, 77] *= 20
    x, turn, start = (
        mx.array(k)[None, None],
        BlockHadamard(128),
        np.array(normal_codebook(12, 4)[0, 0, ::16], np.float32),
    )
    factors = smoothing(x)
    found = []
    for smooth, rotate in ((False, False), (True, False), (False, True), (True, True)):
        y = x / factors if smooth else x
        y = turn.forward(y) if rotate else y
        rms = mx.sqrt(mx.square(y).mean())
        book = (mx.array(refined((y / rms).reshape(-1, 4), start, 12, 1 << 15, 0)) * rms)[None, None]
        back = vectors.entries_of(vectors.nearest(y, book), book)
        back = turn.inverse(back) if rotate else back
        back = back * factors if smooth else back
        found.append(float(mx.square(back - x).sum() / mx.square(x).sum()))
    assert found[3] == pytest.approx(0.0111, rel=0.1) and found[3] < 0.5 * min(found[:3])


@pytest.mark.parametrize("rows", [60, 600])
@pytest.mark.parametrize("keys", [True, False])
def test_products_are_those_of_the_rows(rows: int, keys: bool) -> None:
    """Below 512 rows with the universal codebook, above with one per sequence; by tables and by tiles alike."""
    x = gaussian(2, 3, rows, 80) * mx.exp(gaussian(80, seed=3))
    bound = fitted(codec(8, 8, 80, keys), x)
    codes = bound.encode(x)
    decoded, p = bound.decode(codes), mx.softmax(gaussian(2, 3, 2, rows, seed=5), axis=-1)
    for r in (2, vectors.TABLE_ROWS + 1):
        q = gaussian(2, 3, r, 80, seed=4)
        # float32 sums of 80 products through the rotation; factors from 0.1 to 10
        assert mx.allclose(bound.scores(q, codes), q @ decoded.swapaxes(-1, -2), rtol=1e-4, atol=1e-3)
    assert mx.allclose(bound.mix(p, codes), p @ decoded, rtol=1e-4, atol=1e-4)
    assert bound._per_sequence == (rows == 600)
    one = fitted(codec(8, 8, 80, keys), x[1:])  # a sequence is its own
    assert mx.allclose(one.decode(one.encode(x[1:])), decoded[1:], rtol=1e-4, atol=1e-4)


def test_a_codebook_of_the_prompt_is_better_than_the_universal_one() -> None:
    """Values on few values per number are nothing like normal."""
    x = mx.round(gaussian(1, 2, 700, 64) * 0.7)
    own = relative(fitted(codec(8, 8, 64, keys=False), x), x)
    assert own < 0.9 * relative(fitted(codec(8, 8, 64, keys=False), x[:, :, :500]), x)


def test_a_fit_when_the_prompt_ends_or_at_a_count() -> None:
    """Deferred without a count; afterwards factors stay, whatever comes."""
    c, data = cache(), tensors(200)
    feed(c, data, [100, 100])
    assert not c.store.sealed
    feed(c, tensors(1, seed=7), [1])
    assert c.store.keys.packed is not None and c.store.keys.packed.n == (201 - 32) // 32 * 32
    factors = c.store.keys.packed.fitted["smooth"] * 1
    turned = BlockHadamard(64).forward(mx.concatenate([data.k, tensors(1, seed=7).k], axis=2))
    feed(c, tensors(64, seed=3), [1] * 64)
    assert mx.array_equal(c.store.keys.packed.fitted["smooth"], factors) and turned.shape[2] == 201
    counted = cache(n_calib_tokens=100)
    feed(counted, data.part(0, 99), [99])
    assert not counted.store.sealed
    feed(counted, data.part(99, 100), [1])
    assert counted.store.keys.n_sealed == (100 - 32) // 32 * 32


@pytest.mark.parametrize("lead", [(), (2,), (8,), (16,), (2, 16), (2, 8), (1, 16)])
def test_codebooks_of_every_shape(lead: tuple[int, ...]) -> None:
    """``(K, d)``, per head, per place, both; 2 heads, 16 places of keys and 8 of values."""
    key, value = (gaussian(*lead, 16, d) for d in (4, 8))
    more: dict[str, Any] = {"smooth_factors": np.ones(64), "key_sub_dim": 4}
    for side, book, places in (("key", key, 16), ("value", value, 8)):
        fits = not lead or lead == (2,) or lead == (places,) or (len(lead) == 2 and lead[1] == places)
        fields: dict[str, Any] = {f"{side}_codebook": book, f"{side}_codebook_bits": 4}
        fields |= more if side == "key" else {}
        data = tensors(100)
        if not fits:
            with pytest.raises(QuantizerConfigError, match=f"{side}_codebook of shape"):
                feed(cache(**fields), data, [100])
            continue
        c = cache(**fields)
        feed(c, data, [99, 1])
        rows = c.materialize()[side == "value"][:, :, :64]
        turn = BlockHadamard(64)
        y = turn.forward(rows) if side == "key" else rows
        sub = book.shape[-1]
        full = np.array(book).reshape(
            *((1, 1) if not lead else (*lead, 1) if lead == (2,) else (1, *lead)[-2:]), 16, sub
        )
        full = np.broadcast_to(full, (2, places, 16, sub))
        parts = np.array(y).reshape(2, 64, places, 1, sub)
        gap = np.abs(parts - full[:, None]).max(-1).min(-1)
        assert gap.max() < 5e-3  # every sub-vector is an entry of its own codebook; entries are float16


def test_per_head_wins_where_heads_are_as_many_as_places() -> None:
    book = gaussian(16, 16, 4)
    layer = LayerInfo(head_dim=64, value_dim=64, kv_heads=16)
    config = KVCacheConfig(method="vecinfer", key_codebook=book, key_codebook_bits=4)
    made = method("vecinfer").recipe(config, layer).keys.codec
    assert isinstance(made, ProductVectors) and made._book.shape == (16, 1, 16, 4)


def test_given_arrays_need_no_fit() -> None:
    """All three given: nothing waits for the prompt, nothing is noted; ``bit_width_inlier`` may be anything."""
    fields: dict[str, Any] = {
        "smooth_factors": np.ones((2, 64)), "key_codebook": gaussian(256, 8), "value_codebook": gaussian(256, 8)
    }  # fmt: skip
    c = cache(**fields)
    feed(c, tensors(100), [100])
    assert c.store.sealed and c.describe()["notes"] == []
    c = cache(**fields, bit_width_inlier=[3, 4])
    assert "bit_width_inlier has no effect" in c.describe()["notes"][0]
    told = " ".join(cache(smooth_factors=np.ones((2, 64))).describe()["notes"])
    assert "no key_codebook, value_codebook" in told and "codebooks for normal numbers" in told


def test_given_factors_are_used() -> None:
    x = gaussian(1, 2, 100, 64)
    given = codec(8, 8, 64, smooth=mx.full((2, 64), 3.0))
    assert mx.allclose(given.fit(x)["smooth"], mx.broadcast_to(vectors.spread(x), (1, 2, 1, 64)), rtol=1e-5)


def test_artifact_of_a_model() -> None:
    """Arrays, what is said of a short text, and a cache that takes them for its constants."""
    model = tiny.build("llama")
    text: Any = tiny.tokens(300)[0].tolist()
    sample = collect(model, [text], ("keys", "values"), limit=300)[0]
    arrays, told = vecinfer_codebooks(sample, key=(8, 8), value=(8, 8))
    assert {name: a.shape for name, a in arrays.items()} == {
        "smooth_factors": (2, 16), "value_spread": (2, 1), "key_codebook": (256, 8), "value_codebook": (256, 8)
    }  # fmt: skip
    assert told == []
    short = collect(model, [text], ("keys", "values"), limit=100)[0]
    assert "only 400 sub-vectors of keys" in vecinfer_codebooks(short, key=(8, 8), value=(8, 8))[1][0]
    layers = {i: {name: mx.array(a) for name, a in arrays.items()} for i in range(len(model.layers))}
    store = CalibrationArtifact("vecinfer", layers)
    fields: dict[str, Any] = {"key_codebook_bits": 8, "key_sub_dim": 8, "residual_length": 0, "store": store}
    made = KVCacheBuilder.for_model(model, KVCacheConfig(method="vecinfer", **fields))[0]
    keys, values = (sample.parts[name][None] for name in ("keys", "values"))
    for stream, rows, is_key in ((made.store.keys, keys, True), (made.store.values, values, False)):
        assert stream.spec.codec is not None and stream.spec.codec.fit_rows == 0
        side = codec(8, 8, 16, keys=is_key)
        # as good as a fit on these very rows, with the universal codebook (fewer than 512)
        assert relative(stream.spec.codec, rows) < 1.02 * relative(fitted(side, rows), rows)
    assert made.describe()["notes"] == ["arrays that the configuration does not have are from the calibration artifact"]
    with pytest.raises(QuantizerConfigError, match="key_codebook"):
        KVCacheBuilder.for_model(model, KVCacheConfig(method="vecinfer", store=store))


def test_artifact_of_the_default_sizes() -> None:
    """What ``veloxquant calibrate`` makes fits the default configuration, and says that this text is short for it."""
    model = tiny.build("llama")
    text: Any = tiny.tokens(60)[0].tolist()
    store, told = fit_artifact(model, [text], "vecinfer")
    assert len(told) == 2 * len(model.layers) and "sub-vectors of keys for 4096 entries" in told[0]
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="vecinfer", store=store, residual_length=0))
    mx.eval(model(tiny.tokens(40), cache=caches))
    assert caches[0].store.keys.n_sealed == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key_sub_dim": 0}, "key_sub_dim"),
        ({"key_sub_dim": 3}, "key_sub_dim"),
        ({"key_codebook_bits": 17}, "key_codebook_bits"),
        ({"residual_length": -1}, "residual_length"),
        ({"key_codebook": np.zeros((256, 4))}, "key_codebook of shape"),
        ({"value_codebook": np.zeros((256, 4))}, "value_codebook of shape"),
        ({"smooth_factors": np.zeros(128)}, "smooth_factors"),
        ({"smooth_factors": np.full(128, np.nan)}, "smooth_factors"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizerConfigError, match=message):
        method("vecinfer").check(KVCacheConfig(method="vecinfer", **fields))


def test_factors_of_another_size_are_refused() -> None:
    with pytest.raises(QuantizerConfigError, match="smooth_factors of shape"):
        cache(smooth_factors=np.ones((3, 64)), head_dim=64).update_and_fetch(tensors(4).k, tensors(4).v)
