"""Tiers of tokens by their own size: ranked when the prompt ends, by the thresholds found there later on.

The saliency of AMC (Hu et al., arXiv 2607.10109), for rows of a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..codecs.ranks import HIGH, MID, magnitudes, ranked, tier_counts
from .guide import Guide, PerRow, due, nothing
from .scores import newest

if TYPE_CHECKING:
    from ..cache.store import Store
    from .scores import Step

QUERIES = 32  # newest queries that are averaged; those of one call would depend on how the text was fed


@dataclass(frozen=True)
class Adaptive:
    """Thresholds fall by ``gamma * ln(v / variance)`` of themselves, ``v`` that of the newest ``window`` saliencies."""

    gamma: float
    variance: float
    window: int

    def factor(self, recent: mx.array) -> mx.array:
        """Of thresholds, for saliencies ``(..., m)``: ``(...,)``. Not below 0, and a variance of 0 counts as tiny."""
        found = mx.maximum(mx.var(recent, axis=-1), 1e-12)
        return mx.maximum(1 - self.gamma * mx.log(found / self.variance), 0.0)


@dataclass(frozen=True)
class MagnitudeTiers(Guide):
    """Saliency is the mean size of a key's numbers; keys and values of a token are in one tier of ``codecs.ranks``.

    The rows of the prompt are ranked: ``shares`` of them are high and middle. Where the last of each stands is the
    threshold of all later rows, which come ``segment`` at a time: no more of them are high or middle than a segment
    has room for, the most salient first, and those that find no room are one tier lower. With an ``alpha`` below 1 the
    saliency, brought between 0 and 1 by the extremes of the prompt, is mixed with ``(1 + cos) / 2`` of the key and the
    mean of the newest queries of its head.

    In ``store.aux``: ``guide.tau`` float32 ``(B, H, 2)``, ``guide.ends`` likewise (the extremes), ``guide.recent`` the
    newest saliencies ``(B, H, m)``, ``guide.newest`` the newest queries ``(B, Hq, m, D)``; the last three only where
    something reads them.
    """

    survives_drops = True

    shares: tuple[float, float]
    segment: int
    alpha: float = 1.0
    adaptive: Adaptive | None = None

    @property
    def needs_queries(self) -> bool:  # type: ignore[override]
        """Only where they take part."""
        return self.alpha < 1

    def observe(self, store: Store, step: Step) -> None:
        if self.needs_queries:
            newest(store, "guide.newest", step.queries, QUERIES)

    def rows(self, store: Store, offset: int, ends: bool) -> PerRow:
        start, stop = due(store.keys, ends)
        if start == stop:
            return nothing
        aux, of_prompt = store.aux, store.keys.of_prompt(ends)
        if of_prompt or "guide.tau" not in aux:  # a prompt that was too short for a fit: all rows there are
            self._learn(store, start, stop if of_prompt else store.n)
        saliency = self._saliency(store, start, stop)
        counts = tier_counts(stop - start, *self.shares)
        tiers = ranked(saliency, counts) if of_prompt else self._gated(saliency, aux)
        if self.adaptive is not None:
            aux["guide.recent"] = self._with_recent(aux, saliency)[..., -self.adaptive.window :] * 1
        return lambda first, last: tiers[..., first - start : last - start]

    def _learn(self, store: Store, start: int, stop: int) -> None:
        """Thresholds, and what comes before them, from rows ``start`` to ``stop``."""
        aux = store.aux
        aux.pop("guide.recent", None)
        if self.needs_queries:
            sizes = magnitudes(store.keys.dense(start, stop))
            aux["guide.ends"] = mx.stack([sizes.min(axis=-1), sizes.max(axis=-1)], axis=-1)
        falling = -mx.sort(-self._saliency(store, start, stop), axis=-1)
        high, mid = tier_counts(stop - start, *self.shares)
        never = mx.full(falling.shape[:2], np.inf)
        # A tier that took all that was left has no end.
        tau = [-never if n == stop - start else falling[..., n - 1] if n else never for n in (high, high + mid)]
        aux["guide.tau"] = mx.stack(tau, axis=-1)

    def _saliency(self, store: Store, start: int, stop: int) -> mx.array:
        """Of rows ``start`` to ``stop``: float32 ``(B, H, m)``."""
        keys = store.keys.dense(start, stop).astype(mx.float32)
        sizes = magnitudes(keys)
        if not self.needs_queries:
            return sizes
        low, high = mx.split(store.aux["guide.ends"], 2, axis=-1)
        own = mx.clip((sizes - low) / mx.maximum(high - low, 1e-12), 0.0, 1.0)
        queries = store.aux["guide.newest"].astype(mx.float32).mean(axis=2)
        query = queries.reshape(*keys.shape[:2], -1, keys.shape[3]).mean(axis=2)[..., None]
        norms = mx.linalg.norm(keys, axis=-1) * mx.linalg.norm(query, axis=-2)
        cosine = (keys @ query)[..., 0] / mx.maximum(norms, 1e-12)
        return self.alpha * own + (1 - self.alpha) * (1 + cosine) / 2

    def _gated(self, saliency: mx.array, aux: dict[str, mx.array]) -> mx.array:
        """Tiers of later rows, segment by segment."""
        b, h, n = saliency.shape
        x, tau = saliency.reshape(b, h, -1, self.segment), aux["guide.tau"][:, :, None]
        if self.adaptive is not None:
            tau = tau * self.adaptive.factor(self._windows(aux, saliency))[..., None]
        rooms = tier_counts(self.segment, *self.shares)
        high = (x >= tau[..., :1]) & (ranked(x, (rooms[0], 0)) > 0)
        rest = mx.where(high, -np.inf, x)
        mid = ~high & (x >= tau[..., 1:]) & (ranked(rest, (rooms[1], 0)) > 0)
        return (high * HIGH + mid * MID).astype(mx.uint8).reshape(b, h, n)

    def _with_recent(self, aux: dict[str, mx.array], saliency: mx.array) -> mx.array:
        return mx.concatenate([aux["guide.recent"], saliency], axis=-1) if "guide.recent" in aux else saliency

    def _windows(self, aux: dict[str, mx.array], saliency: mx.array) -> mx.array:
        """The newest saliencies at the end of every segment, its own included: ``(B, H, segments, window)``."""
        assert self.adaptive is not None
        found, window = self._with_recent(aux, saliency), self.adaptive.window
        n, total = saliency.shape[-1], found.shape[-1]
        ends = total - n + np.arange(self.segment, n + 1, self.segment)
        # Where there are fewer, those there are, over and over.
        back = np.arange(window)[None] % np.minimum(ends, window)[:, None]
        return mx.take(found, mx.array(ends[:, None] - 1 - back), axis=-1)
