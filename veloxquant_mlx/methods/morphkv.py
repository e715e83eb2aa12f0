"""MorphKV: keep a window of newest tokens and what its queries attended to; the size never grows.

Paper: Ghadia et al., "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs", ICML 2025,
arXiv:2503.00979. Paper setting: no sinks. Where the authors' versions differ, ours is fixed: the window is the newest
tokens, the current one included; shares are taken over the older tokens alone, summed over the window and then averaged
over the query heads of a kv head. The prompt is attended to in full and cut once at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..policies.eviction import Eviction
from ..policies.observed import RecentCorrelation
from ._method import MethodInfo, check_capacity, check_room, ints, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class MorphKVOptions:
    """Options of ``morphkv``."""

    morphkv_budget: int = option(512, "tokens kept per head", ints(1))
    morphkv_n_sink: int = option(4, "first tokens that always stay", ints(0))
    morphkv_window: int = option(8, "newest tokens, whose queries do the scoring", ints(1))


# No field exists for it: shares are summed over the window (the authors' other choice is the largest).
FUSION = "sum"

INFO = MethodInfo(
    name="morphkv",
    title="MorphKV",
    family="eviction",
    paper="Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs",
    arxiv="2503.00979",
    venue="ICML 2025",
    needs="real queries",
    options=MorphKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "morphkv_budget", "morphkv_n_sink", "morphkv_window")
    check_capacity(config, "morphkv_budget")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """One cut at the end of the prompt, then one row less for every row more; each kv head keeps its own rows."""
    window = config.morphkv_window
    score = RecentCorrelation(window, FUSION)
    policy = Eviction(config.morphkv_budget, config.morphkv_n_sink, window, score, per_step=True)
    return Recipe(keys=Stream(), values=Stream(), eviction=policy)
