"""CurDKV: leverage scores of keys and values (an approximate CUR decomposition) choose what stays.

Paper: Sengupta, Chaudhary, Chakraborty, "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
NeurIPS 2025, arXiv:2509.15038. The score is the product of squared key and value norms, each normalised in windows of
16 tokens. Uncertain: whether the paper normalises in windows. Ours: the newest token stays, and later turns of a chat
choose again, with windows over the tokens held. ``curdkv_rope_base`` is kept for compatibility and has no effect;
``curdkv_rank_cap`` has one only where ``LEVERAGE`` uses a rank: exact norms are better and cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..policies.eviction import Eviction
from ..policies.leverage import How, Leverage
from ._method import MethodInfo, check_capacity, check_room, floats, ints, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class CurDKVOptions:
    """Options of ``curdkv``."""

    curdkv_budget: int = option(512, "tokens kept per head", ints(1))
    curdkv_n_sink: int = option(4, "first tokens that always stay", ints(0))
    curdkv_rank_cap: int = option(16, "rank of the leverage scores where LEVERAGE uses one", ints(1))
    curdkv_rope_base: float = option(10000.0, "no effect", floats("(0, inf)"))


# No field exists for these two. LEVERAGE: "norm" (exact norms), "sketch" (norms after a Gaussian projection to
# curdkv_rank_cap columns, the paper's) or "svd" (textbook leverage of that rank).
WINDOW = 16
LEVERAGE: How = "norm"

INFO = MethodInfo(
    name="curdkv",
    title="CurDKV",
    family="eviction",
    paper="Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
    arxiv="2509.15038",
    venue="NeurIPS 2025",
    options=CurDKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "curdkv_budget", "curdkv_n_sink", extra=1)
    check_capacity(config, "curdkv_budget")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Everything is kept until the prompt ends; decoded tokens are only added."""
    score = Leverage(WINDOW, LEVERAGE, config.curdkv_rank_cap, config.seed)
    policy = Eviction(config.curdkv_budget, sinks=config.curdkv_n_sink, score=score)
    return Recipe(keys=Stream(), values=Stream(), eviction=policy)
