"""Lossless coding of packed codes for caches at rest: a range coder (``constriction``) under counted frequencies.

Nobody attends on a coded stream, so a cache in memory keeps its fixed width; files hold what this module writes. Tables
are integers and the coder is exact, so that every machine decodes the same codes; a checksum of the codes proves it.
Tables are deflated counts of 16 bits. The idea is CacheGen's (arXiv:2310.07240), the container is ours.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import constriction
import mlx.core as mx
import numpy as np

from ..core.exceptions import CacheStateError
from .packing import pack, padded, row_multiple, to_words, unpack

MAGIC, VERSION = b"VQEC", 1
# Magic, version, kind of tables, levels, dimensions, crc of the codes, bytes of tables, words of payload; then come the
# shape, the tables, the payload and a crc of all that.
_HEAD = struct.Struct("<4sBBHBxxxIQQ")
_CRC = struct.Struct("<I")
_TOP_COUNT = 65535

_stream: Any = constriction.stream  # pyright: ignore[reportAttributeAccessIssue]  # a compiled module without types


class Tables(IntEnum):
    """Which frequencies a record holds: none (all codes alike), one table, one table for every row."""

    UNIFORM = 0
    POOLED = 1
    PER_ROW = 2


def encode_bytes(codes: np.ndarray, per_row: bool = True) -> bytes:
    """A record of ``codes`` uint8 ``(..., n)`` that ``decode_bytes`` turns back into the same array.

    The tables that make the record smallest are chosen; tables for every row of ``n`` codes only with ``per_row``.
    """
    if codes.dtype != np.uint8 or codes.ndim == 0:
        raise TypeError(f"codes are {codes.dtype} {codes.shape}: they must be a uint8 array with at least one axis")
    rows = _rows(codes)
    counts = _counts(rows)
    kind, tables, stored = _cheapest(counts, per_row)
    coder = _stream.queue.RangeEncoder()
    for part, table in zip(rows.reshape(len(tables), -1), tables, strict=True):
        coder.encode(part.astype(np.int32), _model(table))
    payload = coder.get_compressed().astype("<u4")
    sizes = len(stored), payload.size
    head = _HEAD.pack(MAGIC, VERSION, kind, counts.shape[1], codes.ndim, zlib.crc32(rows.tobytes()), *sizes)
    shape = struct.pack(f"<{codes.ndim}Q", *codes.shape)
    record = b"".join([head, shape, stored, payload.tobytes()])
    return record + _CRC.pack(zlib.crc32(record))


def decode_bytes(record: bytes) -> np.ndarray:
    """The codes of a record; CacheStateError for one that is damaged, cut short, or from a newer version."""
    if len(record) < _HEAD.size + _CRC.size or record[:4] != MAGIC:
        raise CacheStateError("this is not a record of entropy-coded codes")
    _, version, kind, levels, ndim, check, n_bytes, n_words = _HEAD.unpack_from(record)
    if version != VERSION:
        raise CacheStateError(f"the codes have format {version}; this version reads {VERSION}. Use a newer version.")
    if zlib.crc32(record[: -_CRC.size]) != _CRC.unpack_from(record, len(record) - _CRC.size)[0]:
        raise CacheStateError("a record of entropy-coded codes is damaged or cut short")
    shape = struct.unpack_from(f"<{ndim}Q", record, _HEAD.size)
    at = _HEAD.size + 8 * ndim
    stored = record[at : at + n_bytes]
    tables = np.ones((1, levels)) if kind == Tables.UNIFORM else _inflate(stored).reshape(-1, levels)
    payload = np.frombuffer(record, "<u4", n_words, at + n_bytes).astype(np.uint32)
    decoder = _stream.queue.RangeDecoder(payload)
    rows = np.zeros((len(tables), math.prod(shape) // len(tables)), np.uint8)
    for part, table in zip(rows, tables, strict=True):
        part[:] = decoder.decode(_model(table), part.size)
    if zlib.crc32(rows.tobytes()) != check:
        raise CacheStateError("entropy-coded codes came back changed: the coder differs from the one that wrote them")
    return rows.reshape(shape)


def empirical_bits(codes: np.ndarray, per_row: bool = True) -> float:
    """The empirical entropy of ``codes`` ``(..., n)`` in bits, tables not counted: what no coder reaches."""
    counts = _counts(_rows(codes))
    return _bits(counts if per_row else counts.sum(0, keepdims=True))


def channel_codes(words: mx.array, bits: int) -> np.ndarray:
    """The codes in ``words`` ``(B, H, n, W)`` (words, or rows of bytes), channel by channel: uint8 ``(B, H, c, m)``.

    Channels and tokens at the end that are all zeros (padding, room to grow) are left out.
    """
    codes = np.array(unpack(to_words(words, bits) if words.dtype == mx.uint8 else words, bits))
    tokens, channels = codes.any((0, 1, 3)), codes.any((0, 1, 2))
    m, c = (int(np.flatnonzero(used).max(initial=-1)) + 1 for used in (tokens, channels))
    return np.ascontiguousarray(codes[:, :, :m, :c].swapaxes(-1, -2))


def encode_words(words: mx.array, bits: int, per_channel: bool = True) -> mx.array:
    """Packed codes ``(B, H, n, W)`` as one record, uint8 ``(bytes,)``."""
    return mx.array(np.frombuffer(encode_bytes(channel_codes(words, bits), per_channel), np.uint8))


def decode_words(record: mx.array, bits: int, shape: Sequence[int], size: int = 4) -> mx.array:
    """The packed codes of a record, as ``encode_words`` got them in ``shape``: words, or with ``size=1`` bytes."""
    codes = decode_bytes(np.array(record).tobytes())
    *lead, n, wide = shape
    whole = np.zeros((*lead, n, padded(wide * size * 8 // bits, row_multiple(bits))), np.uint8)
    whole[..., : codes.shape[-1], : codes.shape[-2]] = codes.swapaxes(-1, -2)
    words = pack(mx.array(whole), bits)
    return words if size == 4 else mx.contiguous(words.view(mx.uint8)[..., :wide])


def _rows(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes).reshape(math.prod(codes.shape[:-1]), codes.shape[-1])


def _counts(rows: np.ndarray) -> np.ndarray:
    """How often each level occurs in each row, ``(rows, levels)``; a coder needs at least two levels."""
    levels = max(int(rows.max(initial=0)) + 1, 2)
    counts = [np.bincount(row, minlength=levels) for row in rows]
    return np.array(counts, np.int64).reshape(len(rows), levels)


def _bits(counts: np.ndarray) -> float:
    totals = counts.sum(-1)
    return float((totals * np.log2(np.maximum(totals, 1))).sum() - (counts * np.log2(np.maximum(counts, 1))).sum())


def _cheapest(counts: np.ndarray, per_row: bool) -> tuple[Tables, np.ndarray, bytes]:
    """The tables with the smallest sum of their own bytes and the entropy under them, and these bytes."""
    levels, pooled = counts.shape[1], counts.sum(0, keepdims=True)
    options = [(counts.sum() * math.log2(levels), Tables.UNIFORM, np.ones((1, levels)), b"")]
    for kind, sums in ((Tables.POOLED, pooled), (Tables.PER_ROW, counts))[: 1 + per_row]:
        tables = _fit(sums)
        options.append((_bits(sums), kind, tables, _deflate(tables)))
    return min(options, key=lambda option: option[0] + 8 * len(option[3]))[1:]


def _deflate(tables: np.ndarray) -> bytes:
    """Counts as two planes of bytes, the upper one nearly all zeros."""
    planes = tables.astype("<u2").view(np.uint8).reshape(-1, 2).T
    return zlib.compress(planes.tobytes(), 9)


def _inflate(data: bytes) -> np.ndarray:
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(2, -1)
    return np.ascontiguousarray(planes.T).view("<u2")


def _fit(counts: np.ndarray) -> np.ndarray:
    """Counts as they fit in 16 bits; what occurs keeps at least 1."""
    peak = counts.max(-1, keepdims=True, initial=1)
    return np.where(peak > _TOP_COUNT, -(-counts * _TOP_COUNT // peak), counts)


def _model(table: np.ndarray) -> Any:
    return _stream.model.Categorical(table.astype(np.float64), perfect=False)
