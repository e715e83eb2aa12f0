"""The store by itself: exact first rows (sinks), which no built method asks for yet, on every path."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from tests import matrix
from tests.matrix import Row, identical, tensors
from veloxquant_mlx.cache.places import Places
from veloxquant_mlx.cache.stream import StreamStore
from veloxquant_mlx.codecs.affine import ChannelAffine, TokenAffine
from veloxquant_mlx.codecs.base import Codec
from veloxquant_mlx.core.types import Stream

TOKENS, SINKS, WINDOW = 200, 5, 8
ROWS = mx.random.normal((1, 2, TOKENS, 64), key=mx.random.key(0))
CODECS: dict[str, tuple[Codec, int]] = {
    "channels": (ChannelAffine(4, 32), 32),
    "tokens": (TokenAffine(4, 32, dim=64), 1),
}


def filled(name: str, chunks: Sequence[int]) -> StreamStore:
    codec, chunk = CODECS[name]
    spec, at = Stream(codec, window=WINDOW, chunk=chunk, sinks=SINKS), 0
    store = StreamStore(spec, Places())
    for n in chunks:
        store.append(ROWS[:, :, at : at + n])
        store.seal()
        at += n
    return store


@pytest.mark.parametrize("name", CODECS)
def test_sinks_and_window_stay_exact(name: str) -> None:
    store, (codec, chunk) = filled(name, [TOKENS]), CODECS[name]
    sealed = (TOKENS - SINKS - WINDOW) // chunk * chunk
    assert (store.sinks.n, store.n_sealed, store.n) == (SINKS, sealed, TOKENS)
    packed = codec.decode(codec.encode(ROWS[:, :, SINKS : SINKS + sealed]))
    parts = [ROWS[:, :, :SINKS], packed, ROWS[:, :, SINKS + sealed :]]
    assert identical(store.dense(), mx.concatenate(parts, axis=2))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("chunks", [[1] * TOKENS, [3, 1, 10, 100, 86]], ids=["ones", "mixed"])
def test_chunks_make_no_difference(name: str, chunks: list[int]) -> None:
    mine, whole = filled(name, chunks).arrays(), filled(name, [TOKENS]).arrays()
    assert mine.keys() == whole.keys() and all(identical(mine[k], whole[k]) for k in mine)


@pytest.mark.parametrize("name", CODECS)
def test_products_equal_the_dense_rows(name: str) -> None:
    store = filled(name, [TOKENS])
    q = mx.random.normal((1, 2, 3, 64), key=mx.random.key(1))
    p = mx.softmax(mx.random.normal((1, 2, 3, TOKENS), key=mx.random.key(2)), axis=-1)
    # float32 sums of 64 and 200 terms of order one, in another order
    assert mx.allclose(store.scores(q), q @ store.dense().swapaxes(-1, -2), rtol=1e-5, atol=1e-4)
    assert mx.allclose(store.mix(p), p @ store.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("kept", [195, 150, SINKS + 1, SINKS, 3, 0])
def test_truncate_and_grow_again(name: str, kept: int) -> None:
    """What is kept reads as before; sinks that were cut are taken from the next rows."""
    store = filled(name, [TOKENS])
    before = store.dense()
    store.truncate(kept)
    assert store.n == kept
    if kept:
        assert mx.allclose(store.dense(), before[:, :, :kept], rtol=1e-5, atol=1e-5)
    store.append(ROWS[:, :, kept:])
    store.seal()
    assert (store.n, store.sinks.n) == (TOKENS, SINKS)
    assert identical(store.dense(0, SINKS), ROWS[:, :, :SINKS])
    assert identical(store.dense(TOKENS - WINDOW), ROWS[:, :, TOKENS - WINDOW :])


@pytest.mark.parametrize("row", matrix.ROWS, ids=lambda row: row.id)
def test_every_array_is_all_that_has_a_name(row: Row) -> None:
    """After a prompt, between update and attention, and after it."""
    cache, data = row.cache(), tensors(140)

    def check() -> None:
        assert sorted(map(id, cache.every_array())) == sorted(map(id, cache.arrays().values()))

    for start, stop in ((0, 138), (138, 139), (139, 140)):
        part = data.part(start, stop)
        cache.update_and_fetch(part.k, part.v)
        check()
        cache.attend(part.q, scale=0.125, mask="causal" if stop - start > 1 else None)
        check()
