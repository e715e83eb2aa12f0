"""The state depends on the tokens, never on how they were chunked."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.matrix import IDS, ROWS, Row, feed, same_rows, same_state, split, stored_bytes, tensors

TOKENS = 300


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("size", [1, 7, 64, 299])
def test_chunk_invariance(row: Row, size: int) -> None:
    if size == 1 and row.per_step:
        pytest.skip("tokens that come one by one are decoded, not a prompt")
    data = tensors(TOKENS, (2, 2, 64, 64))
    whole, pieces = row.cache(), row.cache()
    feed(whole, data, [TOKENS])
    # the second of two single tokens would end the prompt
    feed(pieces, data, split(TOKENS, max(size, 2) if row.prompt_block else size))
    for cache in (whole, pieces):
        cache.end_prefill()
    assert same_rows(whole, pieces)
    assert whole.offset == pieces.offset == TOKENS
    assert stored_bytes(whole) == stored_bytes(pieces)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_first_call_of_one_token(row: Row) -> None:
    data = tensors(201)
    first, whole = row.cache(), row.cache()
    feed(first, data, [1, 199, 1])
    feed(whole, data, [200, 1])
    assert same_rows(first, whole)


@pytest.mark.parametrize("row", [r for r in ROWS if r.drops], ids=[r.id for r in ROWS if r.drops])
def test_last_prompt_token_alone_ends_the_prompt(row: Row) -> None:
    """mlx_lm feeds the last prompt token by itself: the same rows stay as with the whole prompt and end_prefill."""
    data = tensors(TOKENS)
    as_mlx_lm, whole = row.cache(), row.cache()
    feed(as_mlx_lm, data, [*split(TOKENS - 1, 128), 1])
    feed(whole, data, [TOKENS])
    whole.end_prefill()
    assert same_rows(as_mlx_lm, whole)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_decode_continues(row: Row) -> None:
    """40 decoded tokens after two chunkings of the same prompt: same outputs, within float32 sums in another order."""
    data = tensors(TOKENS + 40)
    outs = []
    for chunks in ([TOKENS - 1], split(TOKENS - 1, 50)):
        outs.append(feed(row.cache(), data, [*chunks, *[1] * 41])[:, :, TOKENS:])
    assert mx.allclose(*outs, rtol=1e-4, atol=1e-5)


# Rotations, probes.
SEEDED = ("turboquant_mse", "turboquant_prod", "turboquant_rvq", "polar", "qjl", "spectral", "zipcache", "a2ats")


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_determinism(row: Row) -> None:
    data = tensors(150)
    a, b, other = row.cache(), row.cache(), row.cache(seed=7)
    for cache in (a, b, other):
        feed(cache, data, [149, 1])
    assert same_state(a, b)
    assert same_state(a, other) == (row.method not in SEEDED)
