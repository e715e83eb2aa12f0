"""Rows that a query reads, found by vector-quantised keys before RoPE: the index of A2ATS (arXiv 2502.12665)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..codecs import product
from . import ring
from .scores import Score

if TYPE_CHECKING:
    from ..cache.store import Store
    from ..models.rope import Rotation
    from .scores import Step

SINKS = 8  # first rows that are always read
FEWEST = 64  # rows and queries of a fit
QUERIES, ROWS = 512, 4096  # most newest queries, and most rows, of a fit
SWEEPS, HELD = 10, 1 << 24  # of k-means: sweeps, and distances at a time
INDEX, BOOKS, METRIC, SEEN = "index", "books", "metric", "queries"


@dataclass(frozen=True)
class VectorIndex(Score):
    """Attention over the first rows, the newest ``window`` and, of the others, the ``fraction`` that promises most.

    What a row promises is ``q . k`` of its code, without its position: the query stands ``distance`` after every row.
    Codes are product codes of ``bits`` per ``sub`` numbers of ``k L``, where ``L L^T`` is the metric: second moments of
    the queries, shrunk by ``shrink`` towards the identity. The largest over the query heads of a kv head counts.

    ``metric`` ``(H | 1, D, D)`` (as ``factored`` has it) and ``books`` ``(H | 1, P | 1, K, sub)`` are fitted on the
    sequence where they are None: on its newest queries and (the first ``limit``) keys when the prompt ends, or once
    there are FEWEST rows; until then everything is read. In the store: ``row_aux["index"]`` ``(B, H * bytes, n)``,
    ``aux["metric"]`` float32 ``(B, H, D, D)`` and ``aux["books"]`` float16 ``(B, H, P, K, sub)``.
    """

    bits: int
    sub: int
    window: int
    distance: int
    fraction: float
    shrink: float
    rope: Rotation | None = None
    limit: int | None = None
    seed: int = 0
    metric: mx.array | None = None
    books: mx.array | None = None

    def observe(self, store: Store, step: Step) -> None:
        length = step.queries.shape[2]
        if step.offset == length:  # nothing was held before
            ring.forget(store, BOOKS, METRIC, SEEN)
            store.row_aux.pop(INDEX, None)
        if self._ready(store):
            self._add(store, length)
            return
        ring.remember(store, step.queries, QUERIES, SEEN)
        if not step.prompt:
            self.prepare(store, step.offset)

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        raise AssertionError("nothing is dropped")

    def prepare(self, store: Store, offset: int) -> None:
        """Fit what is missing, where there is enough to fit it on, and code the rows held."""
        if self._ready(store) or store.n < FEWEST:
            return
        keys, m = self._plain(store.keys.dense(), 0), store.aux[SEEN].shape[2]
        first = keys[:, :, : self.limit or store.n]
        if self.metric is None:
            queries = self._far(store.aux[SEEN], mx.arange(offset - m, offset, dtype=mx.int32))
            store.aux[METRIC] = factored(moments(queries, keys.shape[1]), self.shrink)
        if self.books is None:
            store.aux[BOOKS] = fit_books(first @ lower(self._metric(store)), self.bits, self.sub, self.seed)
        ring.forget(store, SEEN)
        self._add(store, store.n)

    def select(self, store: Store, q: mx.array, scale: float) -> mx.array | None:
        n, newest = store.n, max(self.window, 1)
        far = n - SINKS - newest
        count = max(1, ceil(self.fraction * far - 1e-9))
        if count >= far or INDEX not in store.row_aux:
            return None
        best = mx.argpartition(-self.promise(store, q)[..., SINKS : n - newest], count - 1, axis=-1)[..., :count]
        near = mx.concatenate([mx.arange(SINKS, dtype=mx.int32), mx.arange(n - newest, n, dtype=mx.int32)])
        near = mx.broadcast_to(near, (*best.shape[:2], near.size))
        return mx.concatenate([near, best.astype(mx.int32) + SINKS], axis=-1)

    def promise(self, store: Store, q: mx.array) -> mx.array:
        """Estimates ``(B, H, n)`` for queries ``q`` ``(B, Hq, 1, D)`` of the newest row, the largest of their heads."""
        b, h = q.shape[0], store.keys.heads
        y = self._far(q, mx.array([store.n - 1])).reshape(b, h, -1, q.shape[3]) @ upper(self._metric(store))
        books = self._books(store)
        codes = store.row_aux[INDEX].reshape(b, h, -1, store.n).swapaxes(-1, -2)
        codes = product.unpack_index(mx.contiguous(codes), self.bits, q.shape[3] // self.sub)
        table = product.tables(y.reshape(1, b * h, *y.shape[2:]), books)
        return product.look_up(table, codes.reshape(1, b * h, *codes.shape[2:])).max(axis=2).reshape(b, h, -1)

    def _ready(self, store: Store) -> bool:
        return all(own is not None or name in store.aux for own, name in ((self.metric, METRIC), (self.books, BOOKS)))

    def _add(self, store: Store, new: int) -> None:
        """Code the newest ``new`` rows, or all where rows before them have no codes."""
        old = store.row_aux.get(INDEX)
        start = store.n - new if old is not None and old.shape[-1] == store.n else 0
        z = self._plain(store.keys.dense(start), start) @ lower(self._metric(store))
        b, h, n, _ = z.shape
        found = product.nearest(z.reshape(1, b * h, n, -1), self._books(store))
        codes = product.pack_index(found, self.bits).swapaxes(-1, -2).reshape(b, -1, n)
        store.row_aux[INDEX] = codes if old is None or not start else mx.concatenate([old[..., :start], codes], axis=-1)

    def _metric(self, store: Store) -> mx.array:
        return store.aux[METRIC] if self.metric is None else self.metric[None]

    def _books(self, store: Store) -> mx.array:
        """Of all heads of all sequences ``(B * H, P | 1, K, sub)``, or ``(1, P | 1, K, sub)``."""
        if self.books is None:
            return store.aux[BOOKS].reshape(-1, *store.aux[BOOKS].shape[2:])
        b = store.keys.batch if self.books.shape[0] > 1 else 1
        return mx.concatenate([self.books] * b) if b > 1 else self.books

    def _plain(self, keys: mx.array, start: int) -> mx.array:
        """Keys of rows from ``start`` on without their positions, float32."""
        keys, at = keys.astype(mx.float32), mx.arange(start, start + keys.shape[2], dtype=mx.int32)
        return keys if self.rope is None else self.rope.turn(keys, -at[None, None])

    def _far(self, queries: mx.array, positions: mx.array) -> mx.array:
        """Queries of ``positions`` ``(m,)`` moved to the position ``distance``, float32."""
        queries = queries.astype(mx.float32)
        return queries if self.rope is None else self.rope.turn(queries, self.distance - positions[None, None])


def moments(queries: mx.array, heads: int) -> mx.array:
    """Mean of ``q^T q`` ``(B, heads, D, D)`` over queries ``(B, Hq, m, D)`` and the query heads of a kv head."""
    b, hq, m, d = queries.shape
    q = queries.reshape(b, heads, hq // heads * m, d)
    return q.swapaxes(-1, -2) @ q / q.shape[2]


def factored(h: mx.array, shrink: float) -> mx.array:
    """Both factors of a metric in one matrix ``(..., D, D)``: ``L`` below and on the diagonal, ``L^-T`` above it.

    ``L L^T = shrink I + (1 - shrink) h``, where ``h`` ``(..., D, D)`` is scaled to a mean diagonal of one, plus 1e-6 I.
    """
    x = np.array(h.astype(mx.float32), dtype=np.float64)
    d = x.shape[-1]
    mean = np.trace(x, axis1=-2, axis2=-1)[..., None, None] / d
    x = np.divide(x, mean, out=np.zeros_like(x), where=mean > 0)
    root = np.linalg.cholesky((1 - shrink) * x + (shrink * (mean > 0) + (mean <= 0) + 1e-6) * np.eye(d))
    other = np.linalg.inv(root).swapaxes(-1, -2)
    return mx.array((root + np.triu(other, 1)).astype(np.float32))


def lower(metric: mx.array) -> mx.array:
    """``L`` of ``factored``: rows ``k`` become ``k L``."""
    return mx.tril(metric)


def upper(metric: mx.array) -> mx.array:
    """``L^-T`` of ``factored``: rows ``q`` become ``q L^-T``."""
    return mx.triu(metric, 1) + mx.eye(metric.shape[-1]) / mx.diagonal(metric, axis1=-2, axis2=-1)[..., None]


def fit_books(z: mx.array, bits: int, sub: int, seed: int) -> mx.array:
    """Codebooks float16 ``(B, H, D / sub, 2 ** bits, sub)`` of rows ``z`` ``(B, H, n, D)``, of at most ROWS evenly."""
    b, h, n, d = z.shape
    if n > ROWS:
        z, n = z[:, :, mx.arange(ROWS) * n // ROWS], ROWS
    x = z.reshape(b * h, n, d // sub, sub).swapaxes(1, 2).reshape(-1, n, sub)
    step = max(1, HELD // (n << bits))
    books = []
    for start in range(0, x.shape[0], step):
        books.append(kmeans(x[start : start + step], 1 << bits, seed))
        mx.eval(books[-1])
    return mx.concatenate(books).reshape(b, h, d // sub, 1 << bits, sub).astype(mx.float16)


def kmeans(x: mx.array, count: int, seed: int) -> mx.array:
    """``count`` centres ``(G, count, d)`` of every group of rows ``(G, n, d)`` float32: k-means++, then Lloyd.

    The draws are the same for all groups. A centre without rows stays where it is.
    """
    draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed % 2**32))).random(count)
    chosen, left = [], mx.ones(x.shape[:2])
    for i, draw in enumerate(draws.tolist()):
        total = mx.cumsum(left, axis=-1)
        at = mx.minimum((total <= draw * total[:, -1:]).sum(axis=-1, keepdims=True), x.shape[1] - 1)
        chosen.append(mx.take_along_axis(x, at[..., None], axis=1))
        distance = mx.square(x - chosen[-1]).sum(axis=-1)
        left = mx.minimum(left, distance) if i else distance
    centres = mx.concatenate(chosen, axis=1)
    for _ in range(SWEEPS):
        near = mx.argmax(x @ centres.swapaxes(-1, -2) - mx.square(centres).sum(-1)[:, None] / 2, axis=-1)
        inside = (near[:, None] == mx.arange(count)[:, None]).astype(mx.float32)
        size = inside.sum(axis=-1, keepdims=True)
        centres = mx.where(size > 0, inside @ x / mx.maximum(size, 1), centres)
    return centres
