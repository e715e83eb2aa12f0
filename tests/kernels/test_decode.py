"""The kernels of decode attention, in the emulation, against the reference on the rows that the codes stand for."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import emulation
from tests.kernels.cases import by_kernel, check, codec, expected, product, queries, store, stream
from tests.matrix import ROWS, Row, Shape, identical, tensors
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.attention.kernels import decode, launch, tensor
from veloxquant_mlx.attention.kernels.sides import sides
from veloxquant_mlx.attention.masks import Mask
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.store import Store
from veloxquant_mlx.codecs.base import Codec
from veloxquant_mlx.codecs.clipped import ClippedToken
from veloxquant_mlx.codecs.codebook import ScalarCodebook
from veloxquant_mlx.codecs.levels import lloyd_max
from veloxquant_mlx.codecs.nested import NestedKeys, NestedValues
from veloxquant_mlx.codecs.pages import PagedAffine
from veloxquant_mlx.codecs.sketch import SignSketch, Sketched, projections
from veloxquant_mlx.codecs.transformed import Transformed
from veloxquant_mlx.core.types import LayerInfo, Stream
from veloxquant_mlx.transforms.rotation import RandomHadamard, rotation

# Axes of five: run 5 a + b takes entry a + w b of axis w, so that every pair of entries of two axes occurs in 25 runs.
REPEATS = (1, 3, 4, 6, 8)  # query heads per kv head; the axis of weight 0 is the head size
LENGTHS = (1, 2, 3, 5, 8)
MASKS = ("open", "causal", "window", "padding", "additive")
KINDS = ("floats", "token", "channel", "codebook", "product")
DTYPES = (  # of queries and of rows
    (mx.float32, mx.float32),
    (mx.float16, mx.float16),
    (mx.bfloat16, mx.bfloat16),
    (mx.float32, mx.float16),
    (mx.float16, mx.float32),
)
DIMS = (64, 80, 96, 128, 256)
GROUPS = (8, 16, 32, 64, 128)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the CPU, and calls as short as those of tests have several shares."""
    monkeypatch.setattr(launch, "run", emulation.run)
    monkeypatch.setattr(decode, "SHARE", 64)


def masked(kind: str, shape: tuple[int, ...]) -> Mask:
    """A mask for scores of ``shape`` ``(B, Hq, L, n)``."""
    b, hq, length, n = shape
    at, rows = mx.arange(n), mx.arange(n - length, n)[:, None]
    if kind == "window":
        return (at <= rows) & (at > rows - 40)
    if kind == "padding":  # on the left, as batches of prompts have it
        return (at <= rows) & (at >= mx.array([0, 37, 5])[:b, None, None, None])
    if kind == "additive":
        noise = mx.random.normal((1, hq, length, n), key=mx.random.key(6))
        return mx.where(mx.random.uniform(shape=noise.shape, key=mx.random.key(7)) < 0.4, noise, -1e9)
    return "causal" if kind == "causal" else None


def drawn(run: int) -> tuple[int, int, int, int, int, int]:
    a, b = divmod(run, 5)
    return a, b, (a + b) % 5, (a + 2 * b) % 5, (a + 3 * b) % 5, (a + 4 * b) % 5


def test_the_table_has_all_pairs() -> None:
    for x, y in combinations(range(6), 2):
        assert len({(drawn(run)[x], drawn(run)[y]) for run in range(25)}) == 25


@pytest.mark.parametrize("run", range(25))
def test_grid(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits, groups, layouts of values, batches, sinks, windows, lengths and learned sinks take turns, and so do one
    launch for everything and two.
    """
    if run % 2:
        monkeypatch.setattr(launch, "backend", lambda: "cuda")
    d, r, at, m, k, t = drawn(run)
    dim, value_dim, repeats, length, bits = DIMS[d], DIMS[(d + run % 2) % 5], REPEATS[r], LENGTHS[at], 1 + run % 8
    query_dtype, dtype = DTYPES[t]
    shape = (3 if MASKS[m] == "padding" or run % 3 == 1 else 1, 1 + run % 2, dim, value_dim)
    n = 167 + 2 * run
    keys = stream(codec(KINDS[k], dim, bits, GROUPS[(d + k) % 5]), window=run % 8, sinks=run % 4)
    kind = ("token", "codebook", "floats", "product")[run % 4]
    values = stream(codec(kind, value_dim, 1 + (run + 3) % 8, GROUPS[(d + r) % 5]), window=run % 5, sinks=run % 3)
    held = store(keys, values, n - length, shape, dtype, later=length)
    q = queries(shape, repeats, length, query_dtype)
    learned = mx.linspace(-2.0, 4.0, q.shape[1]) if run % 3 == 0 else None
    check(held, q, masked(MASKS[m], (*q.shape[:3], n)), learned)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("keys", "values"), [("channel", "token"), ("codebook", "codebook"), ("token", "product")])
def test_bits(keys: str, values: str, bits: int) -> None:
    """Every width of every layout, where rows do not fill their words; groups take turns."""
    shape = (1, 2, 80, 72)
    held = store(
        stream(codec(keys, 80, bits, GROUPS[bits % 5]), window=9),
        stream(codec(values, 72, bits, GROUPS[(bits + 1) % 5]), window=6, sinks=2),
        213,
        shape,
    )
    check(held, queries(shape, 2, 1))


@pytest.mark.parametrize("group", GROUPS)
def test_groups(group: int) -> None:
    """Group sizes of both orientations where they divide rows and where they do not."""
    shape = (1, 1, 80, 96)
    keys, values = codec("channel", 80, 4, group), codec("token", 96, 4, group)
    check(store(stream(keys), stream(values), 150, shape), queries(shape, 1, 3), "causal")


@pytest.mark.parametrize("books", [(1, 1), (2, 1), (1, 16), (2, 16)], ids=["one", "heads", "places", "both"])
@pytest.mark.parametrize("bits", [5, 9, 12])
def test_product_codebooks(books: tuple[int, int], bits: int) -> None:
    """Codebooks per head and per place, indices above one byte, keys with factors of their own per channel."""
    shape = (2, 2, 64, 64)
    keys = product(64, bits, 4, books, channels=True)
    values = product(64, bits, 4, books)
    check(store(stream(keys, window=3), stream(values, window=30), 140, shape), queries(shape, 2, 1))


def test_a_codebook_per_sequence() -> None:
    """As prompts of 512 rows and more teach it."""
    shape, bound = (3, 2, 64, 64), []
    for seed in (2, 3):
        book = mx.random.normal((3, 1, 64, 4), key=mx.random.key(seed)).astype(mx.float16)
        factors = mx.random.uniform(0.5, 1.5, (3, 2, 1, 64 if seed == 2 else 1), key=mx.random.key(seed))
        bound.append(product(64, 6, 4, (1, 1)).bind({"smooth": factors, "book": book}))
    check(store(stream(bound[0]), stream(bound[1]), 90, shape, later=3), queries(shape, 2, 3), "causal")


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (NestedKeys(2, 32, 4), NestedValues(2, 32, 4, dim=64)),
        (ClippedToken(3, 32, dim=64), ClippedToken(3, 32, dim=64, fp8=False)),
        (PagedAffine(2, 2, 0.25, 32, 64, dim=64), None),
    ],
    ids=["nested", "clipped", "paged"],
)
def test_affine_codes_with_parameters_of_another_kind(keys: Codec, values: Codec | None) -> None:
    """Steps on the grid of a finer width, parameters of one byte, pages without a high plane."""
    check(store(stream(keys), stream(values), 131), queries((1, 2, 64, 64), 2, 1))


@pytest.mark.parametrize("m", [64, 100, 200])
def test_sign_sketches(m: int) -> None:
    """Fewer and more projections than numbers; bits that fill no whole word."""
    shape = (1, 2, 64, 64)
    keys = SignSketch(projections(64, m, 3, 1))
    check(store(stream(keys, window=20), stream(codec("token", 64, 2)), 131, shape), queries(shape, 3, 2), "causal")


@pytest.mark.parametrize(("bits", "m", "turned"), [(1, 64, True), (2, 100, True), (3, 64, False), (7, 200, True)])
def test_sketches_of_what_codes_miss(bits: int, m: int, turned: bool) -> None:
    """Two sets of codes whose scores add up, each in a basis of its own; more query rows than a group holds."""
    shape = (3, 2, 64, 64)
    base = ScalarCodebook(64, lloyd_max(bits), bits)
    keys: Codec = Sketched(base, SignSketch(projections(64, m, 3, 1)))
    keys = Transformed(keys, rotation(64, 2)) if turned else keys
    held = store(stream(keys, window=20, sinks=3), stream(codec("codebook", 64, bits)), 131, shape)
    check(held, queries(shape, 3, 3), "causal")


def test_turboquant_prod() -> None:
    """As the method builds it without outlier channels."""
    config = KVCacheConfig(method="turboquant_prod", bit_width_inlier=3)
    recipe = CompressedKVCache(config, LayerInfo(head_dim=80, value_dim=80))._recipe
    check(store(recipe.keys, recipe.values, 90, (1, 2, 80, 80), later=2), queries((1, 2, 80, 80), 3, 2), "causal")


CHANNEL, TOKEN = codec("channel", 64, 4), codec("token", 64, 4)
SHAPE: Shape = (3, 2, 64, 64)
N = 151


def four_bits(shape: Shape = SHAPE) -> Store:
    return store(stream(CHANNEL, window=9), stream(TOKEN, window=5), N, shape)


def bits_of_rows(share: float, shape: tuple[int, ...]) -> mx.array:
    """Random rows in sight; row 7 always."""
    return (mx.random.uniform(shape=shape, key=mx.random.key(5)) < share) | (mx.arange(shape[-1]) == 7)


@pytest.mark.parametrize(
    "shape",
    [(4, N), (1, N), (1, 1, N), (3, 1, 1, N), (1, 6, 4, N), (3, 6, 1, N), (3, 2, 4, N), (3, 6, 4, N)],
    ids=str,
)
@pytest.mark.parametrize("kind", [mx.bool_, mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_masks(shape: tuple[int, ...], kind: mx.Dtype) -> None:
    """Axes that are there, that are one, and that are not there; heads are query heads or kv heads."""
    seen = bits_of_rows(0.3, shape)
    if kind != mx.bool_:
        seen = mx.where(seen, mx.random.normal(shape, key=mx.random.key(6)), mx.finfo(kind).min).astype(kind)
    check(four_bits(), queries(SHAPE, 3, 4), seen)


@pytest.mark.parametrize("kind", [mx.bool_, mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("learned", [False, True], ids=["plain", "sinks"])
def test_rows_that_see_nothing(kind: mx.Dtype, learned: bool) -> None:
    """They take the mean of all rows as in every other path, or nothing where a learned sink takes it all."""
    seen = bits_of_rows(0.3, (1, 1, 4, N)) & (mx.arange(4) != 2)[:, None]
    mask = seen if kind == mx.bool_ else mx.where(seen, mx.zeros(1), mx.finfo(kind).min).astype(kind)
    # Scores around -65504 have steps of 2^-8, so that weights are off by 2^-8 of themselves, and values reach 4.
    atol = 2.0**-6 if kind == mx.float16 else 2e-5
    check(four_bits(), queries(SHAPE, 3, 4), mask, mx.linspace(-3.0, 4.0, 6) if learned else None, atol=atol)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_learned_sinks(dtype: mx.Dtype) -> None:
    """From next to nothing to nearly all of the weight."""
    check(four_bits(), queries(SHAPE, 3, 2), "causal", mx.linspace(-9.0, 12.0, 6).astype(dtype))


FLOATS = stream(None)
KEYS, VALUES = stream(CHANNEL), stream(TOKEN)


@pytest.mark.parametrize(
    ("keys", "values", "n"),
    [
        (KEYS, FLOATS, 100),
        (FLOATS, VALUES, 100),
        (KEYS, VALUES, 128),
        (KEYS, stream(TOKEN, sinks=3), 32),
        (stream(CHANNEL, sinks=60), stream(TOKEN, window=70), 200),
        (stream(CHANNEL, window=70), stream(TOKEN, sinks=66), 200),
        (FLOATS, VALUES, 1),
        (KEYS, VALUES, 1),
        (KEYS, VALUES, 33),
    ],
    ids=["float-values", "float-keys", "no-tail", "one-block", "early-values", "late-values", "one", "one-float", "33"],
)
def test_parts_of_a_store(keys: Stream, values: Stream, n: int) -> None:
    """Sinks, packed rows and tail of different lengths on both sides, each of them missing in turn."""
    check(store(keys, values, n), queries((1, 2, 64, 64), 2, 1), None)


@pytest.mark.parametrize("n", [65, 100, 127, 128, 129, 193, 500])
@pytest.mark.parametrize("share", [1, 31, 33, 64, 4096])
@pytest.mark.parametrize("back", [None, "cuda"])
def test_shares(n: int, share: int, back: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of a whole number of steps and not, shares that get no rows, one share for all."""
    monkeypatch.setattr(decode, "SHARE", share)
    monkeypatch.setattr(launch, "backend", lambda: back)
    check(store(stream(CHANNEL, window=40), stream(TOKEN, window=37), n), queries((1, 2, 64, 64), 4, 2), "causal")


@pytest.mark.parametrize("kind", ["token", "channel", "codebook", "product", "floats"])
@pytest.mark.parametrize("back", [None, "cuda"])
def test_the_order_of_lanes_does_not_matter(kind: str, back: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lanes raced for shared memory, or groups for the last place, another order would give other numbers."""
    monkeypatch.setattr(launch, "backend", lambda: back)
    values = codec("token" if kind == "channel" else kind, 64, 5)
    held = store(stream(codec(kind, 64, 5), window=9), stream(values, window=20), 171)
    q = queries((1, 2, 64, 64), 3, 3)
    once = by_kernel(held, q, "causal")
    monkeypatch.setattr(launch, "run", partial(emulation.run, backwards=True))
    assert identical(once, by_kernel(held, q, "causal"))


@pytest.mark.parametrize("backwards", [False, True])
def test_tickets_start_again(backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last group of every kv head makes the result, call after call; with more query rows than a group takes."""
    monkeypatch.setattr(launch, "backend", lambda: "cuda")
    monkeypatch.setattr(launch, "run", partial(emulation.run, backwards=backwards))
    held = store(stream(TOKEN, window=9), stream(TOKEN, sinks=3), 171, SHAPE)
    found, q = sides(held, 64), queries(SHAPE, 4, 5)
    assert not isinstance(found, str)
    plan = decode.Plan(*found, q, "causal", None, False)
    monkeypatch.setattr(decode, "CHAINS", 2)
    for at in range(5):
        x = q + at
        assert len(plan.tickets) == min(at, 2)
        assert all(identical(tickets, mx.zeros(6, mx.uint32)) for tickets in plan.tickets)
        out = plan(x, 0.125, "causal", None, held.n)
        np.testing.assert_allclose(np.array(out), expected(held, x, "causal"), atol=2e-5)  # as in ``check``


def forbidden(self: RandomHadamard, x: mx.array) -> mx.array:
    raise AssertionError("a rotation outside the kernel")


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("back", ["", "cuda"])
def test_rotations(dim: int, twice: bool, back: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One Hadamard transform of 32 numbers or more is made by the kernels, others before and after them."""
    inner: Codec = ScalarCodebook(dim, lloyd_max(4), 4)
    for seed in range(1 + twice):
        inner = Transformed(inner, rotation(dim, seed))
    shape, half = (1, 2, dim, dim), mx.float16 if back else mx.float32
    held, q = store(stream(inner), stream(inner, window=9), 150, shape, half), queries(shape, 3, 5, half)
    if back:
        monkeypatch.setattr(launch, "backend", lambda: back)
        monkeypatch.setattr(tensor, "LEAST", 1)
    wanted = expected(held, q, "causal")
    if dim >= 32 and not twice:
        monkeypatch.setattr(RandomHadamard, "forward", forbidden)
        monkeypatch.setattr(RandomHadamard, "inverse", forbidden)
    # On tensor cores half precision of scores of size 3 and of weights, as in test_tensor.py.
    out = np.array(by_kernel(held, q, "causal").astype(mx.float32))
    np.testing.assert_allclose(out, wanted, atol=6e-3 if back else 2e-5)


def test_rows_of_another_dtype() -> None:
    """A stream may hold its float rows in a dtype of its own."""
    keys, values = stream(CHANNEL, window=9, dtype=mx.float16), stream(TOKEN, sinks=4, dtype=mx.bfloat16)
    check(store(keys, values, 77), queries((1, 2, 64, 64), 2, 1, mx.bfloat16))


# ---------------------------------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("mask", [None, "causal", "boolean"])
def test_nan_stays_in_its_query_row(mask: str | None) -> None:
    q = queries(SHAPE, 3, 3)
    q[1, 4, 1, 5] = float("nan")
    seen: Mask = bits_of_rows(0.5, (3, N)) if mask == "boolean" else mask
    out = np.array(by_kernel(four_bits(), q, seen))
    assert np.isnan(out[1, 4, 1]).all()
    assert np.isnan(out).sum() == 64
    check(four_bits(), q, seen)


@pytest.mark.parametrize(("side", "row"), [("keys", 2), ("keys", N - 1), ("values", 2), ("values", N - 1)])
def test_nan_stays_in_its_head(side: str, row: int) -> None:
    """One number of a float row of one sequence and kv head: a sink or the newest row."""
    held = store(stream(CHANNEL, window=9, sinks=4), stream(TOKEN, window=5, sinks=4), N, SHAPE)
    part = getattr(held, side)
    rows, at = (part.sinks, row) if row < 4 else (part.tail, part.tail.n - 1)
    rows.data[1, 1, at, 3] = float("nan")
    check(held, queries(SHAPE, 3, 1))
    out = np.array(by_kernel(held, queries(SHAPE, 3, 1)))
    assert np.isfinite(out[[0, 2]]).all() and np.isfinite(out[1, :3]).all()
    assert np.isnan(out[1, 3:]).sum() == (3 * 64 if side == "keys" else 3)


def test_nan_out_of_sight_leaves_no_trace() -> None:
    """A masked key may be anything."""
    held = four_bits((1, 2, 64, 64))
    rows = held.keys.tail.data
    assert rows is not None
    rows[:, :, held.keys.tail.n - 1] = float("nan")
    mask = mx.arange(N) < N - 1
    check(held, queries((1, 2, 64, 64), 2, 1), mask[None])


# ------------------------------------------------------------------------------------------------------- what is left


READ = {
    "kivi-2",
    "kivi-4-r32",
    "kivi-8-r0",
    "kivi_sink",
    "mse-2",
    "qjl",
    "rvq-1",
    "rvq-2",
    "rvq-3",
    "rvq-4",
    "vecinfer",
}


@pytest.mark.parametrize("row", [row for row in ROWS if not row.drops and not row.indexes], ids=lambda row: row.id)
def test_methods(row: Row) -> None:
    """What kernels read of the methods, with their settings; they say of all others why not."""
    cache, data = row.cache(), tensors(213)
    for start, stop in ((0, 200), (200, 210), (210, 213)):
        part = data.part(start, stop)
        cache.update_and_fetch(part.k, part.v)
        cache.attend(part.q, scale=0.125, mask="causal")
        cache.end_prefill()
        cache.settle()
    found = sides(cache._store, 64)
    assert isinstance(found, str) == (row.id not in READ), found
    if not isinstance(found, str):
        assert cache._store.sealed
        check(cache._store, data.q[:, :, -3:], "causal")


@pytest.mark.parametrize(
    ("keys", "values", "shape", "why"),
    [
        (codec("token", 68, 4), TOKEN, (1, 1, 68, 64), "TokenAffine"),
        (CHANNEL, codec("channel", 64, 4), (1, 1, 64, 64), "values"),
        (codec("token", 264, 4), TOKEN, (1, 1, 264, 64), "264"),
        (CHANNEL, codec("token", 264, 4), (1, 1, 64, 264), "264"),
        (TOKEN, SignSketch(projections(64, 100, 3, 1)), (1, 1, 64, 64), "values"),
        (TOKEN, Sketched(ScalarCodebook(64, lloyd_max(2), 2), SignSketch(projections(64, 64, 3, 1))), SHAPE, "values"),
        (SignSketch(projections(64, 700, 3, 1)), TOKEN, (1, 1, 64, 64), "704"),
    ],
    ids=[
        "odd-size",
        "channel-values",
        "wide-keys",
        "wide-values",
        "signs-as-values",
        "sketched-values",
        "many-projections",
    ],
)
def test_what_kernels_cannot_read(keys: Codec, values: Codec, shape: Shape, why: str) -> None:
    found = sides(store(stream(keys), stream(values), 64, shape), shape[2])
    assert isinstance(found, str) and why in found
