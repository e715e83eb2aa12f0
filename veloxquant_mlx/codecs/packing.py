"""Bit packing in MLX's native layout, and the lookup of codebook values in it.

Codes of one row form a little-endian bit stream in uint32 words along the last axis: code ``i`` takes the bits
``i * bits`` and up, and may cross from one word into the next. ``mx.quantized_matmul`` reads the same words.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import mlx.core as mx
import numpy as np

from ..core.exceptions import QuantizerConfigError
from ..core.types import is_int

BITS = (1, 2, 3, 4, 5, 6, 7, 8)


def check_bits(bits: int) -> int:
    """``bits``, or ``QuantizerConfigError`` where no codec packs that width."""
    if not is_int(bits) or bits not in BITS:
        raise QuantizerConfigError(f"bits={bits!r}: must be one of {BITS}. Choose a width from that list.")
    return bits


def row_multiple(bits: int) -> int:
    """The smallest number of codes that fills whole words: rows must be a multiple of it."""
    return 32 // gcd(32, bits)


def padded(n: int, *multiples: int) -> int:
    """``n`` rounded up to a multiple of every given number."""
    step = int(np.lcm.reduce(multiples))
    return -(-n // step) * step


@cache
def _shifts(bits: int, count: int, dtype: mx.Dtype) -> mx.array:
    shifts = (mx.arange(count) * bits).astype(dtype)
    mx.eval(shifts)  # MLX streams belong to a thread: nothing lazy may stay in a cache
    return shifts


def _bytes_per_group(bits: int) -> int:
    # Whole bytes that hold a whole number of codes: 1 byte for widths that divide 8, else the odd part of the width.
    return 1 if 8 % bits == 0 else bits // (bits & -bits)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Words ``(..., n * bits / 32)`` of integer codes ``(..., n)`` below ``2 ** bits``.

    A row must fill whole words: the caller pads ``n`` to a multiple of ``row_multiple(bits)``.
    """
    check_bits(bits)
    *lead, n = codes.shape
    if n % row_multiple(bits):
        raise QuantizerConfigError(
            f"a row of {n} codes of {bits} bits does not fill whole words: pad it to a multiple of {row_multiple(bits)}"
        )
    if 32 % bits == 0:
        groups = codes.astype(mx.uint32).reshape(*lead, n * bits // 32, 32 // bits)
        return (groups << _shifts(bits, 32 // bits, mx.uint32)).sum(-1)
    # 3, 5 and 7 bytes hold whole codes: build them in a wider integer and drop its upper bytes.
    size = _bytes_per_group(bits)
    wide = mx.uint32 if size == 3 else mx.uint64
    groups = codes.astype(wide).reshape(*lead, n * bits // (8 * size), 8 * size // bits)
    packed = (groups << _shifts(bits, 8 * size // bits, wide)).sum(-1, keepdims=True).view(mx.uint8)
    return packed[..., :size].reshape(*lead, n * bits // 8).view(mx.uint32)


def pack_bytes(codes: mx.array, bits: int) -> mx.array:
    """As ``pack`` for any number of codes, in bytes: uint8 ``(..., W)``, the last codes filled up to whole bytes.

    Widths that do not divide 8 come in groups of codes that fill whole bytes (8 of 3 bits, 4 of 6).
    """
    n, whole = codes.shape[-1], row_multiple(bits)
    spare = -n % whole
    words = pack(mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, spare)]) if spare else codes, bits)
    return words.view(mx.uint8)[..., : padded(n, max(whole // 4, 1)) * bits // 8]


def unpack(words: mx.array, bits: int, n: int | None = None) -> mx.array:
    """The first ``n`` codes (default: all) of every row of ``words`` ``(..., W)``: uint8 ``(..., n)``."""
    codes = unpack_wide(words, check_bits(bits)).astype(mx.uint8)
    return codes if n is None or n == codes.shape[-1] else codes[..., :n]


def unpack_wide(words: mx.array, bits: int) -> mx.array:
    """Codes of up to 14 bits, in the integer type that they were taken from; ``words`` may be whole bytes as well."""
    stream = words.view(mx.uint8)
    *lead, n_bytes = stream.shape
    n = n_bytes * 8 // bits
    if bits == 8:
        return stream
    size = _bytes_per_group(bits)
    wide = {1: mx.uint8, 3: mx.uint32}.get(size, mx.uint64)
    groups = stream.reshape(*lead, n * bits // (8 * size), size)
    if size > 1:
        spare = mx.zeros((*groups.shape[:-1], wide.size - size), dtype=mx.uint8)
        groups = mx.concatenate([groups, spare], axis=-1).view(wide)
    codes = (groups >> _shifts(bits, 8 * size // bits, wide)) & mx.array((1 << bits) - 1, dtype=wide)
    return codes.reshape(*lead, n)


def to_bytes(words: mx.array, n: int, bits: int) -> mx.array:
    """The bytes ``(..., ceil(n * bits / 8))`` uint8 that the first ``n`` codes of every row of ``words`` take."""
    return words.view(mx.uint8)[..., : -(-n * bits // 8)]


def to_words(rows: mx.array, bits: int) -> mx.array:
    """Rows of bytes as the words that ``pack`` makes, the last ones filled up with zeros."""
    spare = -rows.shape[-1] % (row_multiple(bits) * bits // 8)
    return mx.contiguous(mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, spare)])).view(mx.uint32)


def level_array(levels: np.ndarray) -> mx.array:
    """``levels`` in float32, one array for all who have the same: a kernel then reads one table for keys and values."""
    return _levels(np.asarray(levels, dtype=np.float32).tobytes())


@cache
def _levels(levels: bytes) -> mx.array:
    array = mx.array(np.frombuffer(levels, dtype=np.float32))
    mx.eval(array)
    return array


def lookup_table(levels: np.ndarray, bits: int) -> mx.array:
    """The table that ``lookup`` needs for ``2 ** bits`` levels, shared by all who ask for the same.

    An entry holds the two float32 values of two neighbouring codes as one uint64, so that one gather yields two values.
    """
    low = np.asarray(levels, dtype=np.float32)
    if low.shape != (1 << check_bits(bits),):
        raise QuantizerConfigError(f"levels has shape {low.shape}: {bits} bits need exactly {1 << bits} levels")
    return _table(low.tobytes(), bits)


@cache
def _table(levels: bytes, bits: int) -> mx.array:
    low = np.frombuffer(levels, dtype=np.float32)
    if bits == 8:  # a table of pairs would have 65536 entries
        table = mx.array(low)
    else:
        first, second = np.broadcast_to(low[None, :], (low.size, low.size)), np.repeat(low[:, None], low.size, axis=1)
        table = mx.array(np.stack([first, second], axis=-1).reshape(-1).view(np.uint64))
    mx.eval(table)
    return table


def pair_tables(levels: mx.array) -> mx.array:
    """What ``lookup`` needs where every sequence has levels of its own: ``levels`` ``(B, 2 ** bits)``, up to 7 bits."""
    levels = levels.astype(mx.float32)
    b, n = levels.shape
    first, second = (mx.broadcast_to(levels.reshape(b, *shape), (b, n, n)) for shape in ((1, n), (n, 1)))
    return mx.stack([first, second], axis=-1).reshape(b, -1).view(mx.uint64)


def lookup(words: mx.array, bits: int, table: mx.array) -> mx.array:
    """Float32 values ``(..., n)`` of the codes in ``words`` ``(..., W)``.

    ``table`` is from ``lookup_table``, or from ``pair_tables`` for words ``(B, ..., W)``.
    """
    *lead, length = words.shape
    index = unpack_wide(words, bits if bits == 8 else 2 * bits).reshape(*table.shape[:-1], -1)
    # On the CPU a flat take_along_axis takes 0.5 ns per entry where take needs 3 (MLX 0.32.4).
    return (
        mx.take_along_axis(table, index, axis=-1).view(mx.float32).reshape(*lead, length * words.dtype.size * 8 // bits)
    )
