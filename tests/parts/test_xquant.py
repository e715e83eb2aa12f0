"""XQuant: shared codes, relaxed levels, residuals, and who holds what."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.joint import group
from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.codecs.affine import ChannelAffine, TokenAffine
from veloxquant_mlx.codecs.shared import RelaxedChannels, RelaxedTokens, SharedCodes

ROWS = mx.random.normal((1, 2, 128, 64), key=mx.random.key(0))


def both(axis: str, bits: int, residual: int, member: int) -> SharedCodes:
    """A codec of two layers, seen from ``member``, without relaxation at 3 bits and more."""
    if axis == "keys":
        return SharedCodes(RelaxedChannels(bits), ChannelAffine(residual) if residual else None, 2, member)
    own = TokenAffine(residual, dim=64) if residual else None
    return SharedCodes(RelaxedTokens(bits, dim=64), own, 2, member)


@pytest.mark.parametrize(("bits", "plain", "relaxed"), [(1, 0.0833, 0.0277), (2, 0.00926, 0.00760)])
def test_relaxed_levels_of_uniform_numbers(bits: int, plain: float, relaxed: float) -> None:
    """Uniform numbers on [0, 1] whose range is known: the errors of the specification, within sampling (1 %)."""
    x = np.random.default_rng(0).uniform(size=(1, 1, 1 << 16, 32)).astype(np.float32)
    x[..., 0], x[..., -1] = 0.0, 1.0  # the ends of every group of 32 channels
    inner, rows = slice(1, -1), mx.array(x)
    codec = RelaxedTokens(bits, dim=32)
    error = np.array(codec.decode(codec.encode(rows))) - x
    assert np.mean(error[..., inner] ** 2) == pytest.approx(relaxed, rel=0.01)
    levels = (1 << bits) - 1
    assert np.mean((np.round(x * levels) / levels - x)[..., inner] ** 2) == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("axis", ["keys", "values"])
@pytest.mark.parametrize("bits", [3, 4])
def test_borrowed_codes_of_an_affine_layer(axis: str, bits: int) -> None:
    """Layer 2 = a layer 1 + d, a > 0, per vector that shares parameters: its error is a times that of layer 1.

    Float16 parameters round by 2^-11 of the range in each layer.
    """
    shape = (1, 2, 1, 64) if axis == "keys" else (1, 2, 128, 1)
    a = mx.random.uniform(0.5, 2.0, shape, key=mx.random.key(1))
    d = mx.random.normal(shape, key=mx.random.key(2))
    second = a * ROWS + d
    codes = both(axis, bits, 0, 0).encode(mx.concatenate([ROWS, second], axis=1))
    errors = [both(axis, bits, 0, j).decode(codes) - x for j, x in enumerate((ROWS, second))]
    span = second.max() - second.min()
    assert mx.all(mx.abs(errors[1] - a * errors[0]) <= 3 * 2.0**-11 * span)


@pytest.mark.parametrize("axis", ["keys", "values"])
@pytest.mark.parametrize("residual", [2, 4, 8])
def test_residual_is_within_half_a_step_of_its_own(axis: str, residual: int) -> None:
    """Of unrelated layers too: what borrowed codes miss is a group of its own, quantised within half a step."""
    other = mx.random.normal(ROWS.shape, key=mx.random.key(5))
    codes = both(axis, 2, residual, 0).encode(mx.concatenate([ROWS, other], axis=1))
    missed = other - both(axis, 2, 0, 1).decode(codes)
    groups = missed.reshape(1, 2, 4, 32, 64) if axis == "keys" else missed.reshape(1, 2, 128, 2, 32)
    along = 3 if axis == "keys" else 4
    step = (groups.max(along, keepdims=True) - groups.min(along, keepdims=True)) / ((1 << residual) - 1)
    left = (other - both(axis, 2, residual, 1).decode(codes)).reshape(groups.shape)
    rounding = 2.0**-10 * mx.abs(groups).max(along, keepdims=True)  # float16 parameters
    assert mx.all(mx.abs(left) <= step / 2 + rounding + 1e-6)
    assert mx.allclose(
        both(axis, 2, residual, 0).decode(codes), both(axis, 2, 0, 0).decode(codes)
    )  # the first has none


@pytest.mark.parametrize("axis", ["keys", "values"])
@pytest.mark.parametrize("member", [0, 1])
def test_attention_on_codes(axis: str, member: int) -> None:
    codec = both(axis, 2, 4, member)
    codes = codec.encode(mx.concatenate([ROWS, ROWS[..., ::-1]], axis=1))
    q = mx.random.normal((1, 2, 4, 64), key=mx.random.key(3))
    p = mx.softmax(mx.random.normal((1, 2, 4, 128), key=mx.random.key(4)), axis=-1)
    rows = codec.decode(codes)
    assert mx.allclose(codec.scores(q, codes), q @ rows.swapaxes(-1, -2), rtol=1e-4, atol=1e-3)
    assert mx.allclose(codec.mix(p, codes), p @ rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("residual", "bits", "with_window"), [(0, 2.0, 2.438), (4, 4.5, 4.859)])
def test_bits_of_the_storage_table(dim: int, residual: int, bits: float, with_window: float) -> None:
    """Means over two layers: (3 + 1) / 2 bits, or (3 + 6) / 2. Values of 80 numbers are padded to 96.

    128 values of 4,096 wait as floats, which makes the second figure; keys have none left there.
    """
    caches = group("xquant", 2, (1, 2, dim, dim), residual_length=128, xquant_residual_bits=residual)
    tokens = 4096
    for tensor, width in (("keys", dim), ("values", -(-dim // 32) * 32)):
        codecs = [getattr(cache.store, tensor).packed.codec for cache in caches]
        codes = codecs[0].encode(mx.random.normal((1, 4, tokens, dim), key=mx.random.key(0)))
        mine = [{n: a for n, a in codes.items() if codec.owns(n)} for codec in codecs]
        assert sum(8 * a.nbytes for a in codes.values()) == bits * 2 * 2 * tokens * width
        assert mine[0].keys() | mine[1].keys() == codes.keys() and "words" in mine[0]
        assert not any(n.endswith("words") and "r_" not in n for n in mine[1])  # borrowed codes are not held twice
    assert (bits * (tokens - 128) + 16 * 128) / tokens == pytest.approx(with_window, abs=1e-3)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_groups_of_a_model(size: int) -> None:
    """Five layers in groups; the last one may be short, and alone it is a first layer."""
    model = tiny.build("llama", num_hidden_layers=5)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="xquant", xquant_group_size=size, residual_length=32))
    roles = [(c.layer.group, c.layer.member, c.layer.members) for c in caches]
    want = [(i // size, i % size, min(size, 5 - i // size * size)) for i in range(5)]
    assert roles == want
    mx.eval(model(tiny.tokens(100), cache=caches))
    firsts = [any(n.endswith(".words") for n in c.store.arrays()) for c in caches]
    assert firsts == [member == 0 for _, member, _ in want]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("xquant_group_size", 1),
        ("xquant_base_bits", 7),
        ("xquant_residual_bits", 9),
        ("xquant_group_quant_size", 1),
        ("xquant_max_ctx", 0),
        ("residual_length", 33),
    ],
)
def test_refusals(field: str, value: int) -> None:
    with pytest.raises(QuantizerConfigError, match=field):
        KVCacheBuilder.for_model(tiny.build("llama"), KVCacheConfig(**{"method": "xquant", field: value}))
