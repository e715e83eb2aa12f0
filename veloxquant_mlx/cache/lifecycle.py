"""What happens to rows once their attention is done: queries are observed, rows dropped, rows encoded."""

from __future__ import annotations

from enum import Enum

import mlx.core as mx

from ..core.types import Recipe
from ..observers.reporter import Reporter
from .store import Store


class Phase(Enum):
    """Where a policy that drops rows stands (the first single-token call after a prompt ends the prompt)."""

    EMPTY = "empty"
    PREFILL = "prefill"
    DECODE = "decode"


class Lifecycle:
    """Acts on the rows of one update, once, after every attention over it.

    ``new`` counts the rows of the update whose attention is still to come; ``queries``, ``scale`` and learned ``sinks``
    are those of its attention, kept only where the policy's score watches them. An int in ``capacity`` turns the rule
    of the papers (drop at the end of the prompt) into a hard cap.
    """

    def __init__(self, recipe: Recipe, capacity: int | None, reporter: Reporter) -> None:
        self.eviction, self.capacity, self.reporter = recipe.eviction, capacity, reporter
        self.phase = Phase.EMPTY
        self.new = 0
        self.queries: mx.array | None = None
        self.scale = 1.0
        self.sinks: mx.array | None = None

    @property
    def needs_queries(self) -> bool:
        """Whether rows are dropped by what the model's queries attend to."""
        return self.eviction is not None and self.eviction.score is not None

    def attended(self, queries: mx.array, scale: float, sinks: mx.array | None) -> None:
        """Note one attention over the update: ``queries`` ``(B, Hq, L, D)`` and learned sink logits ``(Hq,)``."""
        if self.new and self.needs_queries:
            self.queries, self.scale, self.sinks = queries, scale, sinks

    def settle(self, store: Store, offset: int) -> None:
        """Act on the update. ``offset`` is the number of tokens seen, the update's included."""
        new, queries, self.new, self.queries = self.new, self.queries, 0, None
        if new == 0:
            return
        if self.eviction is None:
            self._seal(store, offset)
            return
        prompt, ends = self.phase is not Phase.DECODE or new > 1, self.phase is Phase.PREFILL and new == 1
        # Once rows were dropped, queries matter again only from the next turn's prompt on.
        if queries is not None and (prompt or self.capacity is not None or store.n == offset):
            self.eviction.observe(store, queries)
        self.phase = Phase.DECODE if ends or not prompt else Phase.PREFILL
        if self.eviction.bounded or ends or (self.capacity is not None and store.n > self.capacity):
            self._evict(store, offset, prompt)
        if self.eviction.bounded or self.phase is Phase.DECODE:
            self._seal(store, offset)

    def end_prefill(self, store: Store, offset: int) -> None:
        """The prompt is complete, whatever the number of tokens that come next."""
        if self.eviction is None:
            return
        self.settle(store, offset)
        if self.phase is Phase.PREFILL or store.n == offset:
            self._evict(store, offset, True)
        self._seal(store, offset)
        self.phase = Phase.DECODE

    def _evict(self, store: Store, offset: int, prompt: bool) -> None:
        assert self.eviction is not None
        begun = self.reporter.begin(store)
        dropped = self.eviction.drop(store, self.scale, self.sinks)
        if not dropped:
            return
        if self.capacity is None and not self.eviction.bounded:
            self.eviction.forget(store)
        if prompt and not self.eviction.bounded:
            # A prompt's rows are many: what is dropped is freed now, not when somebody next looks at what stays.
            mx.eval(list(store.arrays().values()))
        self.reporter.tell("evict", dropped, begun, store, offset)

    def _seal(self, store: Store, offset: int) -> None:
        begun = self.reporter.begin(store)
        if rows := store.seal():
            self.reporter.tell("encode", rows, begun, store, offset)
