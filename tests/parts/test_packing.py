"""Packing: the words are MLX's own, for every width, and lookups equal plain indexing."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant_mlx.codecs.packing import BITS, lookup, lookup_table, pack, padded, row_multiple, unpack
from veloxquant_mlx.core.exceptions import QuantizerConfigError

NATIVE = [b for b in BITS if b != 7]


def random_codes(shape: tuple[int, ...], bits: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, size=shape, dtype=np.uint32)


def reference_words(codes: np.ndarray, bits: int) -> np.ndarray:
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint32)) & 1
    words = stream.reshape(*codes.shape[:-1], -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return words.sum(-1).astype(np.uint32)


@given(st.sampled_from(BITS), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_words_are_the_little_endian_bit_stream(bits, multiple, rows, seed):
    codes = random_codes((rows, 2, row_multiple(bits) * multiple), bits, seed)
    words = pack(mx.array(codes), bits)
    assert words.dtype == mx.uint32
    assert np.array_equal(np.array(words), reference_words(codes, bits))
    assert np.array_equal(np.array(unpack(words, bits)), codes)
    assert np.array_equal(np.array(unpack(words, bits, 3)), codes[..., :3])


@pytest.mark.parametrize("bits", NATIVE)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_mlx_reads_the_words(bits, group):
    codes = random_codes((2, 3, 128), bits)
    words = pack(mx.array(codes), bits)
    ones = mx.ones((2, 3, 128 // group))
    values = mx.dequantize(words, ones, mx.zeros_like(ones), group_size=group, bits=bits)
    assert np.array_equal(np.array(values), codes)
    q = mx.random.normal((2, 4, 128), key=mx.random.key(0))
    out = mx.quantized_matmul(q, words, ones, mx.zeros_like(ones), transpose=True, group_size=group, bits=bits)
    # float32 sums of 128 terms of size up to 2^bits
    np.testing.assert_allclose(out, np.array(q) @ codes.swapaxes(-1, -2), rtol=1e-5, atol=1e-4 * 2**bits)


@pytest.mark.parametrize("bits", BITS)
def test_lookup_is_indexing(bits):
    levels = np.random.default_rng(1).normal(size=1 << bits).astype(np.float32)
    codes = random_codes((2, 3, 7, 96), bits)
    table = lookup_table(levels, bits)
    words = pack(mx.array(codes), bits)
    assert np.array_equal(np.array(lookup(words, bits, table)), levels[codes])
    part = words[:, 1:, 2:5]  # a view into a larger buffer, as the store hands out
    assert np.array_equal(np.array(lookup(part, bits, table)), levels[codes[:, 1:, 2:5]])
    assert np.array_equal(np.array(unpack(part, bits)), codes[:, 1:, 2:5])


def test_golden_word():
    # codes (0, 1, 1, 2, 3) of 2 bits: 0 + 1*4 + 1*16 + 2*64 + 3*256
    assert pack(mx.array([0, 1, 1, 2, 3] + [0] * 11), 2).item() == 916


@pytest.mark.parametrize("call", [
    lambda: pack(mx.zeros((2, 31), dtype=mx.uint32), 3),
    lambda: pack(mx.zeros((2, 32), dtype=mx.uint32), 9),
    lambda: unpack(mx.zeros((2, 1), dtype=mx.uint32), 0),
    lambda: lookup_table(np.zeros(5), 2),
])  # fmt: skip
def test_what_cannot_be_packed_is_refused(call):
    with pytest.raises(QuantizerConfigError):
        call()


def test_padded():
    assert [padded(80, 32, 16), padded(64, 32), padded(80, 24, 32)] == [96, 64, 96]
