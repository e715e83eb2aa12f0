"""NestedKV: anomaly of keys at nested time scales, with budgets that heads compete for.

Paper: Chen et al., "NestedKV: Nested Memory Routing for Long-Context KV Cache Compression", arXiv:2605.26678
(preprint). Uncertain: only its abstract could be read, the formulas are not confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import MethodInfo, check_room, floats, ints, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


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
