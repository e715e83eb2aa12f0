"""NestedKV: anomaly of keys at nested time scales, with budgets that heads compete for.

Paper: Chen et al., "NestedKV: Nested Memory Routing for Long-Context KV Cache Compression", arXiv:2605.26678
(preprint). Uncertain: only its abstract could be read, the formulas are not confirmed; cosines with the mean key (not
products) and keys as they are cached, after RoPE, are our reading. Heads compete as in Ada-KV (arXiv:2407.11550), so
they keep different numbers of tokens; ``nestedkv_safeguard_alpha=1`` gives each the same. Shorter heads are padded to
the longest, and padding is held and counted. Ours: the newest token stays, and later turns of a chat choose again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..policies.anomaly import Anomaly
from ..policies.eviction import Eviction
from ..policies.heads import Compete
from ._method import MethodInfo, check_capacity, check_room, floats, ints, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class NestedKVOptions:
    """Options of ``nestedkv``."""

    nestedkv_budget: int = option(512, "mean tokens kept per head", ints(1))
    nestedkv_n_sink: int = option(4, "first tokens that always stay", ints(0))
    nestedkv_window: int = option(64, "tokens of the shortest time scale", ints(1))
    nestedkv_beta: float = option(3.0, "sharpness of the mix of scales", floats("[0, inf)"))
    nestedkv_tau: float = option(0.6, "centre of the surprise gate", floats("(-inf, inf)"))
    nestedkv_kappa: float = option(10.0, "slope of the surprise gate", floats("(0, inf)"))
    nestedkv_safeguard_alpha: float = option(0.2, "share of the budget that every head is sure of", floats("[0, 1]"))


INFO = MethodInfo(
    name="nestedkv",
    title="NestedKV",
    family="eviction",
    paper="NestedKV: Nested Memory Routing for Long-Context KV Cache Compression",
    arxiv="2605.26678",
    options=NestedKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "nestedkv_budget", "nestedkv_n_sink", extra=1)
    check_capacity(config, "nestedkv_budget")
    if config.capacity is not None and config.nestedkv_safeguard_alpha != 1:
        valid = "None where heads compete: one head alone may keep more than any cap"
        refuse("capacity", config.capacity, valid, "Set nestedkv_safeguard_alpha=1, or leave capacity out.")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Everything is kept until the prompt ends; decoded tokens are only added."""
    score = Anomaly(config.nestedkv_window, config.nestedkv_beta, config.nestedkv_tau, config.nestedkv_kappa)
    share, budget = config.nestedkv_safeguard_alpha, config.nestedkv_budget
    # With the whole budget sure, heads have nothing to compete for: all are equally long, and nothing is padded.
    select = None if share == 1 else Compete.sharing(budget, share)
    policy = Eviction(budget, sinks=config.nestedkv_n_sink, score=score, select=select, ragged=select is not None)
    return Recipe(keys=Stream(), values=Stream(), eviction=policy)
