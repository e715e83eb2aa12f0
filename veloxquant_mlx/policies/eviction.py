"""When rows are dropped, and which. One class for every method that drops rows; methods choose its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from ..models.rope import Rotation
from . import select
from .scores import Score, Step

if TYPE_CHECKING:
    from ..attention.entry import KeyView
    from ..cache.store import Store
    from ..coordinators.base import Coordinator

# The budget of a cache that drops nothing, or nothing any more.
UNLIMITED = 2**31 - 1

# A budget in rows per kv head, from the tokens seen when the prompt ends.
Budget = Callable[[int], int]


class Selector(Protocol):
    """Chooses the rows that stay."""

    def __call__(self, store: Store, score: mx.array, budget: int) -> tuple[mx.array, mx.array | None]:
        """Rows to keep and which of them are no padding (None: all), from protected scores ``(B, H | 1, n)``.

        The index is ``(B | 1, H | 1, m)``, ascending per head.
        """
        ...


class Merge(Protocol):
    """What becomes of a row before it is dropped in decoding."""

    def __call__(self, store: Store, victim: mx.array, step: int) -> None:
        """Move something of row ``victim`` ``(B | 1, H | 1, 1)`` to other rows; ``step`` tokens were seen."""
        ...


class Retrieval(Protocol):
    """Attention of decoded tokens over some of the rows held."""

    def prepare(self, store: Store, offset: int) -> None:
        """A prompt has ended, ``offset`` tokens were seen, and the rows that stay are chosen but not yet packed."""
        ...

    def select(self, store: Store, q: mx.array, scale: float) -> mx.array | None:
        """Rows ``(B, H, k)`` that queries ``q`` ``(B, Hq, 1, D)`` attend to; None for all."""
        ...


@dataclass(frozen=True)
class Eviction:
    """Keep at most ``budget`` rows per kv head: the first ``sinks`` positions, the newest ``recent`` rows, top scores.

    Rows are dropped at the end of the prompt; with ``per_step`` also one after every later token, with ``bounded``
    after every call. Without a ``score`` the kept rows are sinks and recents alone (``sinks + recent == budget``).
    ``select`` replaces the choice of the top scores at the end of a prompt (``ragged``: heads then keep different
    numbers of rows), ``merge`` acts on a row that decoding drops, ``retrieval`` reads some of the rows only, and
    ``coordinator`` decides across layers. ``once``: only the end of the first prompt drops rows. ``recent`` may depend
    on the budget, which may depend on the prompt.
    With a ``rotation`` the sink rows' keys are moved along by as many positions as rows were dropped: streaming methods
    count positions inside the cache.
    """

    budget: int | Budget
    sinks: int = 0
    recent: int | Callable[[int], int] = 1
    score: Score | None = None
    bounded: bool = False
    per_step: bool = False
    select: Selector | None = None
    merge: Merge | None = None
    retrieval: Retrieval | None = None
    ragged: bool = False
    once: bool = False
    coordinator: Coordinator | None = None
    rotation: Rotation | None = None

    @property
    def drops(self) -> bool:
        """Whether rows are ever dropped; a policy with an unlimited budget is there for its ``retrieval``."""
        return self.budget != UNLIMITED

    @property
    def needs_queries(self) -> bool:
        """Whether attention must come back to the cache: for its queries, or for heads of different lengths."""
        return self.retrieval is not None or self.ragged or (self.score is not None and self.score.needs_queries)

    @property
    def watches(self) -> bool:
        """Whether anything is to be seen after an attention."""
        return self.score is not None

    def rows(self, offset: int) -> int:
        """The budget where ``offset`` tokens were seen at the end of a prompt."""
        return self.budget if isinstance(self.budget, int) else self.budget(offset)

    def observe(self, store: Store, step: Step) -> None:
        """See the queries of one call."""
        if self.score is not None:
            self.score.observe(store, step)

    def drop(
        self, store: Store, offset: int, prompt: bool, scale: float, sinks: mx.array | None, budget: int | None = None
    ) -> int:
        """Drop the rows beyond the budget; returns how many per head.

        ``offset`` counts the tokens seen, ``prompt`` says that they came as a prompt, ``sinks`` are learned sink
        logits, ``budget`` overrides the policy's own.
        """
        budget = self.rows(offset) if budget is None else budget
        held = store.live
        excess = held - budget
        if excess <= 0:
            return 0
        if self.score is None:
            if excess == 1 and not prompt and (self.per_step or store.sealed):
                self._drop_one(store, select.oldest(store.positions_or_range(), self.sinks), offset, budget)
            else:
                store.compact()
                store.cut(self.sinks, self.sinks + excess)
            return excess
        positions = store.positions_or_range()
        recent = self.recent if isinstance(self.recent, int) else self.recent(budget)
        score = self.score.score(store, scale, sinks)
        if excess == 1 and self.per_step and not prompt:
            guarded = select.protect(score, positions, self.sinks, recent, offset, hole=mx.inf)
            self._drop_one(store, select.lowest(guarded, positions), offset, budget)
            return 1
        score = select.protect(score, positions, self.sinks, recent, offset, hole=-mx.inf)
        if self.select is None:
            store.keep(*select.top(score, positions, budget))
        else:
            store.keep(*self.select(store, score, budget))
        return excess if self.ragged else held - store.live

    def _drop_one(self, store: Store, victim: mx.array, offset: int, budget: int) -> None:
        if self.merge is not None:
            self.merge(store, victim, offset)
        store.drop_one(victim, slack=budget // 2)

    def forget(self, store: Store) -> None:
        """Free what the score remembers."""
        if self.score is not None:
            self.score.forget(store)

    def key_view(self, dropped: int) -> KeyView | None:
        """How attention must see keys once ``dropped`` rows are gone; None for as they are."""
        rotation, sinks = self.rotation, self.sinks
        if rotation is None or dropped == 0 or sinks == 0:
            return None

        def view(keys: mx.array, start: int) -> mx.array:
            first = max(sinks - start, 0)
            if first == 0:
                return keys
            return mx.concatenate([rotation(keys[:, :, :first], dropped), keys[:, :, first:]], axis=2)

        return view
