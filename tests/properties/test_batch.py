"""Sequences of different lengths in one batch: every row as in a run of its own."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest

from tests.matrix import IDS, ROWS, Row, Tensors, feed, identical, same_state, split, tensors
from veloxquant_mlx import CacheInputError, CacheStateError
from veloxquant_mlx.cache.batch import CompressedBatchCache

LENGTHS = (5, 50, 200)


def singles(row: Row, lengths: tuple[int, ...] = LENGTHS) -> tuple[list, list[Tensors]]:
    """Caches fed their prompts alone, and the tensors of each with 30 more tokens."""
    data = [tensors(n + 30, seed=10 * i) for i, n in enumerate(lengths)]
    caches = [row.cache() for _ in lengths]
    for cache, part, n in zip(caches, data, lengths, strict=True):
        feed(cache, part.part(0, n), [n - 1, 1])
    return caches, data


def stacked(parts: list[Tensors]) -> Tensors:
    return Tensors(*(mx.concatenate([getattr(p, name) for p in parts]) for name in "qkv"))


def step(batch: CompressedBatchCache, parts: list[Tensors]) -> mx.array:
    """One decode step of every row."""
    now = stacked(parts)
    batch.update_and_fetch(now.k, now.v)
    return batch.attend(now.q, scale=0.125)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_merge_decode_extract(row: Row) -> None:
    caches, data = singles(row)
    twins = [copy.deepcopy(cache) for cache in caches]
    batch = type(caches[0]).merge(caches)
    assert batch.nbytes == sum(cache.nbytes for cache in caches)
    assert batch.offset.tolist() == list(LENGTHS)
    for i in range(10):
        parts = [d.part(n + i, n + i + 1) for d, n in zip(data, LENGTHS, strict=True)]
        out = step(batch, parts)
        mx.eval(out, batch.state)
        for j, (twin, part) in enumerate(zip(twins, parts, strict=True)):
            twin.update_and_fetch(part.k, part.v)
            assert identical(out[j : j + 1], twin.attend(part.q, scale=0.125))
    assert all(same_state(batch.extract(i), twin) for i, twin in enumerate(twins))
    assert [cache.offset for cache in caches] == list(LENGTHS)  # the inputs stay as they were


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_join_and_leave(row: Row) -> None:
    """Rows join and leave in the middle: nothing of a neighbour shows."""
    caches, data = singles(row)
    batch = type(caches[0]).merge(caches[:2])
    twin = copy.deepcopy(caches[2])
    for i in range(3):
        step(batch, [data[j].part(LENGTHS[j] + i, LENGTHS[j] + i + 1) for j in range(2)])
    batch.extend(type(caches[0]).merge([caches[2]]))
    batch.filter([2, 0])
    for i in range(4):
        part = data[2].part(200 + i, 201 + i)
        out = step(batch, [part, data[0].part(8 + i, 9 + i)])
        twin.update_and_fetch(part.k, part.v)
        assert identical(out[:1], twin.attend(part.q, scale=0.125))
    assert batch.offset.tolist() == [204, 12] and same_state(batch.extract(0), twin)
    batch.filter(mx.array([0]))
    assert batch.offset.tolist() == [204] and len(batch.rows) == 1
    batch.filter([])
    assert batch.empty() and batch.nbytes == 0 and batch.offset.shape == (0,)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("chunk", [64, 200])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_prompts(row: Row, chunk: int, side: str) -> None:
    """Padding never enters rows, scales, scores or bytes; garbage in it does not show."""
    longest = max(LENGTHS)
    data = [tensors(n, seed=10 * i) for i, n in enumerate(LENGTHS)]
    pads = [longest - n for n in LENGTHS]

    def padded(x: mx.array, pad: int) -> mx.array:
        return mx.pad(x, [(0, 0), (0, 0), (0, pad) if side == "right" else (pad, 0), (0, 0)], constant_values=1e3)

    wide = Tensors(
        *(mx.concatenate([padded(getattr(d, n), p) for d, p in zip(data, pads, strict=True)]) for n in "qkv")
    )
    batch = CompressedBatchCache([row.cache() for _ in LENGTHS])
    if side == "right":
        batch.prepare(lengths=LENGTHS, right_padding=pads)
    else:
        batch.prepare(left_padding=pads)
    at, outs = 0, []
    for n in split(longest, chunk):
        now = wide.part(at, at + n)
        mask = batch.make_mask(n)
        batch.update_and_fetch(now.k, now.v)
        outs.append(batch.attend(now.q, scale=0.125, mask=mask))
        mx.eval(outs[-1], batch.state)
        at += n
    batch.finalize()
    out = mx.concatenate(outs, axis=2)
    for i, (d, n) in enumerate(zip(data, LENGTHS, strict=True)):
        alone = row.cache()
        start = 0 if side == "right" else longest - n
        chunks = [
            len(r) for a in range(0, longest, chunk) if (r := range(max(a, start), min(a + chunk, start + n, longest)))
        ]
        want = feed(alone, d, chunks)
        assert mx.allclose(out[i : i + 1, :, start : start + n], want, rtol=1e-4, atol=1e-5)
        assert same_state(batch.rows[i], alone)
    assert batch.offset.tolist() == list(LENGTHS)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_trim_of_a_batch(row: Row) -> None:
    caches, _ = singles(row)
    batch = type(caches[0]).merge(caches)
    assert batch.is_trimmable() == (not row.drops)
    if row.drops:
        with pytest.raises(CacheStateError, match="cannot trim"):
            batch.trim(2)
        assert batch.offset.tolist() == list(LENGTHS)
    else:
        assert batch.trim(3) == 3 and batch.offset.tolist() == [n - 3 for n in LENGTHS]


def test_merge_takes_empty_and_short_sequences() -> None:
    row = ROWS[0]
    caches = [row.cache(), row.cache(), row.cache()]
    feed(caches[1], tensors(3), [3])
    feed(caches[2], tensors(300), [300])
    batch = type(caches[0]).merge(caches)
    assert batch.offset.tolist() == [0, 3, 300] and batch.size() == 300 and not batch.empty()
    step(batch, [tensors(1, seed=i) for i in range(3)])
    assert batch.offset.tolist() == [1, 4, 301]


def test_refusals() -> None:
    row = ROWS[0]
    several = row.cache((2, 2, 64, 64))
    feed(several, tensors(10, (2, 2, 64, 64)), [10])
    with pytest.raises(CacheStateError, match="takes caches of one sequence; this one holds 2"):
        type(several).merge([several, row.cache()])
    batch = CompressedBatchCache([row.cache(), row.cache()])
    now = tensors(4, (3, 2, 64, 64))
    with pytest.raises(CacheInputError, match="keys have 3 rows; this batch has 2"):
        batch.update_and_fetch(now.k, now.v)
    with pytest.raises(CacheStateError, match="call update_and_fetch first"):
        batch.attend(now.q, scale=0.125)
    with pytest.raises(CacheInputError, match="right_padding needs lengths"):
        batch.prepare(right_padding=[0, 3])
    batch.prepare(lengths=[3, 4])
    with pytest.raises(CacheStateError, match="call finalize first"):
        batch.extend(CompressedBatchCache([row.cache()]))
