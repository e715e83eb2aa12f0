"""How important a stored row is. Scores are float32, one per (batch row, kv head, stored row)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import mlx.core as mx

from ..attention import masks, reference

if TYPE_CHECKING:
    from ..cache.store import Store

# How names in ``store.aux`` begin that a score must leave alone: a guide needs them after rows were dropped.
OF_GUIDE = "guide."


class Step(NamedTuple):
    """One attention: queries ``(B, Hq, L, D)`` exactly as it got them, its scale and learned sink logits ``(Hq,)``.

    ``offset`` is the number of tokens seen: query i of L stands at position ``offset - L + i``. ``prompt`` says that
    the queries are those of a prompt, its last token included.
    """

    queries: mx.array
    scale: float
    sinks: mx.array | None
    offset: int
    prompt: bool = True


class Score(ABC):
    """Watches every attention and scores the rows when asked.

    What it remembers lives in the store: per row in ``store.row_aux``, anything else in ``store.aux``. Rows need not
    lie in the order of their positions. ``needs_queries``: it cannot work where attention does not come back to the
    cache.
    """

    needs_queries: bool = True

    @abstractmethod
    def observe(self, store: Store, step: Step) -> None:
        """See one attention over the rows held, the newest included."""

    @abstractmethod
    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        """Scores ``(B, H | 1, n)``, higher for rows to keep; infinity marks rows that the score itself protects."""

    def forget(self, store: Store) -> None:
        """Drop what was remembered: the rows that it belongs to have been chosen. What a guide remembers stays."""
        for name in [name for name in store.aux if not name.startswith(OF_GUIDE)]:
            del store.aux[name]
        store.row_aux.clear()


def newest(store: Store, name: str, queries: mx.array, most: int) -> None:
    """Hold the newest ``most`` queries ``(B, Hq, m, D)`` in ``store.aux[name]``; ``queries`` are those of one call."""
    old = store.aux.get(name)
    if queries.shape[2] < most and old is not None:
        queries = mx.concatenate([old, queries], axis=2)
    store.aux[name] = queries[:, :, -most:] * 1  # own buffer: a slice would hold the whole chunk


@dataclass(frozen=True)
class WindowAttention(Score):
    """Attention that the newest ``window`` queries pay to each older row, smoothed along the rows.

    Weights are taken over all rows, then averaged over the window and over the query heads of a kv head, then pooled
    with an odd ``kernel`` (zero padding, divisor always ``kernel``). The window's own rows are protected. With ``peak``
    the largest weight counts, not the average.
    ``batched=False`` scores one kv head at a time: the same numbers with less scratch memory. ``decoded=True`` scores
    decoded float32 rows instead of what is stored: for comparison.
    """

    window: int
    kernel: int = 5
    pooling: Literal["mean", "max"] = "mean"
    batched: bool = True
    decoded: bool = False
    peak: bool = False

    def observe(self, store: Store, step: Step) -> None:
        newest(store, "queries", step.queries, self.window)

    def score(self, store: Store, scale: float, sinks: mx.array | None) -> mx.array:
        q, h = store.aux["queries"].astype(mx.float32) * scale, store.keys.heads
        b, hq, window, d = q.shape
        rows = q.reshape(b, h, hq // h * window, d)
        live = masks.live(store)
        if self.batched and not self.decoded:
            seen = self._seen(store.keys.scores(rows), window, sinks, live)
        else:
            # One head at a time is also cast by itself: float32 copies of all heads' keys would be the larger scratch.
            keys, step = store.keys.dense(dtype=mx.float32 if self.batched else None), h if self.batched else 1
            parts: list[mx.array] = []
            for head in range(0, h, step):
                one = mx.depends([rows[:, head : head + step]], parts[-1:])[0]
                share = None if sinks is None else sinks.reshape(h, -1)[head : head + step]
                some = keys[:, head : head + step].astype(mx.float32)
                mine = live if live is None or live.shape[1] == 1 else live[:, head : head + step]
                parts.append(self._seen(one @ some.swapaxes(-1, -2), window, share, mine))
            seen = mx.concatenate(parts, axis=1)
        pooled = pool(seen, self.kernel, self.pooling)
        return mx.concatenate([pooled, mx.full((b, h, window), mx.inf)], axis=-1)

    def _seen(self, scores: mx.array, window: int, sinks: mx.array | None, live: mx.array | None) -> mx.array:
        """Mean (or largest) weight ``(B, H, n - window)`` from scores ``(B, H, R * window, n)``."""
        b, h, rows, n = scores.shape
        z = masks.apply(scores.reshape(b, h, rows // window, window, n), "causal", past=n - window)
        z = masks.apply(z, live, past=n - window)
        weights = reference.softmax(z, sinks)[..., : n - window]
        return weights.max(axis=(2, 3)) if self.peak else weights.mean(axis=(2, 3))


def pool(x: mx.array, kernel: int, how: Literal["mean", "max"]) -> mx.array:
    """``(..., n)`` pooled along the last axis, stride 1, odd ``kernel``; means divide by it at the borders too."""
    half, n = kernel // 2, x.shape[-1]
    fill = 0.0 if how == "mean" else -mx.inf
    padded = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], constant_values=fill)
    if how == "mean":
        return mx.stack([padded[..., i : i + n] for i in range(kernel)]).mean(axis=0)
    span = 1
    while 2 * span <= kernel:  # maxima over 2, 4, 8 ... neighbours: a wide kernel needs no copy per neighbour
        padded, span = mx.maximum(padded[..., :-span], padded[..., span:]), 2 * span
    return mx.maximum(padded[..., :n], padded[..., kernel - span :])
