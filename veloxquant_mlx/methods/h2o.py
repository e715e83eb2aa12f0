"""H2O: keep the tokens with the largest summed attention and the newest ones.

Paper: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", NeurIPS
2023, arXiv:2306.14048. Paper setting: h2o_n_sink = 0, h2o_grace = half the budget, h2o_decay = 1. As in the authors'
code, the whole prompt is attended to in full and cut once at its end; later sums are over the rows that are held. Sums
are averaged over the query heads of a kv head. ``h2o_rope_base`` is kept for compatibility and has no effect: keys keep
the rotation of their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..policies.eviction import Eviction
from ..policies.observed import SummedAttention
from ._method import MethodInfo, check_capacity, check_room, floats, ints, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class H2OOptions:
    """Options of ``h2o``."""

    h2o_budget: int = option(512, "tokens kept per head", ints(1))
    h2o_n_sink: int = option(4, "first tokens that always stay", ints(0))
    h2o_rope_base: float = option(10000.0, "no effect", floats("(0, inf)"))
    h2o_grace: int = option(16, "newest tokens that always stay", ints(0))
    h2o_decay: float = option(0.98, "factor on summed attention per query", floats("(0, 1]"))


INFO = MethodInfo(
    name="h2o",
    title="H2O",
    family="eviction",
    paper="H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
    arxiv="2306.14048",
    venue="NeurIPS 2023",
    needs="real queries",
    options=H2OOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "h2o_budget", "h2o_n_sink", "h2o_grace")
    check_capacity(config, "h2o_budget")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """One cut at the end of the prompt, then one row less for every row more; each kv head keeps its own rows."""
    score = SummedAttention(config.h2o_decay)
    recent = max(config.h2o_grace, 1)  # a token's own weight alone would have it dropped at once
    policy = Eviction(config.h2o_budget, sinks=config.h2o_n_sink, recent=recent, score=score, per_step=True)
    return Recipe(keys=Stream(), values=Stream(), eviction=policy)
