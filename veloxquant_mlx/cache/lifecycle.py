"""What happens to rows once their attention is done: queries are observed, rows dropped, rows encoded."""

from __future__ import annotations

from enum import Enum

import mlx.core as mx

from ..core.types import Recipe
from ..observers.reporter import Reporter
from ..policies.eviction import UNLIMITED
from ..policies.scores import Step
from .store import Store


class Phase(Enum):
    """Where a sequence stands (the first single-token call after a longer one ends the prompt)."""

    EMPTY = "empty"
    PREFILL = "prefill"
    DECODE = "decode"


class Lifecycle:
    """Acts on the rows of one update, once, after every attention over it.

    ``new`` counts the rows of the update whose attention is still to come; ``queries``, ``scale`` and learned ``sinks``
    are those of its attention, kept only where something watches them. An int in ``capacity`` turns the rule of the
    papers (drop at the end of the prompt) into a hard cap. ``budget`` overrides the policy's own, once other layers had
    their say.
    """

    def __init__(self, recipe: Recipe, capacity: int | None, reporter: Reporter) -> None:
        self.eviction, self.guide, self.deferred = recipe.eviction, recipe.guide, recipe.deferred
        self.most = recipe.most_raw[1] if recipe.deferred and recipe.most_raw is not None else None
        self.capacity, self.reporter = capacity, reporter
        self.phase = Phase.EMPTY
        self.new = 0
        self.queries: mx.array | None = None
        self.scale = 1.0
        self.sinks: mx.array | None = None
        self.budget: int | None = None

    @property
    def needs_queries(self) -> bool:
        """Whether the method cannot work without what the model's queries attend to."""
        ev, guide = self.eviction, self.guide
        return (ev is not None and ev.needs_queries) or (guide is not None and guide.needs_queries)

    def attended(self, queries: mx.array, scale: float, sinks: mx.array | None) -> None:
        """Note one attention over the update: ``queries`` ``(B, Hq, L, D)`` and learned sink logits ``(Hq,)``."""
        # Where layers share rows, those of the layer that brought them count: the others do not come here in the first
        # call, and what is kept must not depend on the length of that.
        known = self.queries is not None
        if self.new and not known and ((self.eviction is not None and self.eviction.watches) or self.guide is not None):
            self.queries, self.scale, self.sinks = queries, scale, sinks

    def settle(self, store: Store, offset: int) -> None:
        """Act on the update. ``offset`` is the number of tokens seen, the update's included."""
        new, queries, self.new, self.queries = self.new, self.queries, 0, None
        if new == 0:
            return
        prompt, ends = self.phase is not Phase.DECODE or new > 1, self.phase is Phase.PREFILL and new == 1
        ev = self.eviction
        if queries is not None:
            step = Step(queries, self.scale, self.sinks, offset, prompt)
            if self.guide is not None:
                self.guide.observe(store, step)
            # Once rows were dropped for good, queries matter again only from the next turn's prompt on.
            watched = prompt or (ev is not None and ev.per_step) or self.capacity is not None or store.n == offset
            if ev is not None and watched and (self.budget != UNLIMITED or store.n == offset):
                ev.observe(store, step)
        self.phase = Phase.DECODE if ends or not prompt else Phase.PREFILL
        if ev is not None:
            over = self.capacity is not None and store.live > self.capacity
            if ev.bounded or ends or over or (ev.per_step and not prompt):
                self._evict(store, offset, prompt)
        patient = self.deferred and (self.most is None or store.n < self.most)
        waits = patient or (ev is not None and not ev.bounded)
        if not waits or self.phase is Phase.DECODE:
            self._seal(store, offset, ends)

    def end_prefill(self, store: Store, offset: int) -> None:
        """The prompt is complete, whatever the number of tokens that come next."""
        if self.eviction is None and not self.deferred:
            return
        self.settle(store, offset)
        ends = self.phase is Phase.PREFILL or store.n == offset
        if self.eviction is not None and ends:
            if self.eviction.once and store.n == offset:
                self.budget = None  # nothing was dropped so far, and the caller asks for it
            self._evict(store, offset, True)
        self._seal(store, offset, ends)
        self.phase = Phase.DECODE

    def _evict(self, store: Store, offset: int, prompt: bool) -> None:
        assert self.eviction is not None
        begun = self.reporter.begin(store)
        dropped = self.eviction.drop(store, offset, prompt, self.scale, self.sinks, self.budget)
        if self.eviction.once:
            self.budget = UNLIMITED
        if dropped and self.capacity is None and not self.eviction.bounded and not self.eviction.per_step:
            self.eviction.forget(store)
        if prompt and self.eviction.retrieval is not None:
            self.eviction.retrieval.prepare(store, offset)
        if not dropped:
            return
        if prompt and not self.eviction.bounded:
            # A prompt's rows are many: what is dropped is freed now, not when somebody next looks at what stays.
            mx.eval(list(store.arrays().values()))
        self.reporter.tell("evict", dropped, begun, store, offset)

    def _seal(self, store: Store, offset: int, ends: bool) -> None:
        if store.vacant is not None:  # nothing was due at the budget, and the vacant slot is no row
            return
        begun = self.reporter.begin(store)
        known = None if self.guide is None else self.guide.rows(store, offset, ends)
        if rows := store.seal(known, ends, self.most):
            self.reporter.tell("encode", rows, begun, store, offset)
