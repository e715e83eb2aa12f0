"""SqueezeAttention: layers whose attention changes the hidden state little give tokens to the others.

Paper: Wang, Cui, Gan, "SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal Budget",
ICLR 2025, arXiv:2404.04793.

Budgets come from the cosine between the hidden state before and after each layer's attention, mean over the prompt, in
three clusters; the least important one is left with a share of the mean, the others get the rest alike (as in the
authors' code). Inside a layer tokens are kept as in H2O, half heavy hitters and half newest: the paper works with any
such policy. Budgets are settled once, at the end of the first prompt. Caches that no model made ready by ``for_model``
feeds keep ``squeeze_budget`` tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..coordinators.squeeze import Squeeze
from ..core.types import Recipe, Stream
from ..policies.eviction import Eviction
from ..policies.observed import SummedAttention
from ._method import MethodInfo, check_capacity, check_room, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

# Smallest share of the mean budget that a layer may be left with: our choice. The paper leaves it open; 0.3 to 0.4 is
# said to be typical (uncertain).
P_MIN = 0.35


@dataclass
class SqueezeAttentionOptions:
    """Options of ``squeeze``."""

    squeeze_budget: int = option(512, "mean tokens kept per layer", ints(1))
    squeeze_n_sink: int = option(4, "first tokens that always stay", ints(0))
    squeeze_strength: float = option(1.0, "how far budgets move; 0: all equal", floats("[0, 1]"))
    squeeze_resolved_budget: int | None = option(
        None, "tokens of this layer; None: by the measured layers", optional(ints(1))
    )


INFO = MethodInfo(
    name="squeeze",
    title="SqueezeAttention",
    family="eviction",
    paper="SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal Budget",
    arxiv="2404.04793",
    venue="ICLR 2025",
    needs="real queries",
    options=SqueezeAttentionOptions,
)


def smallest(config: FlatConfig) -> int:
    """The budget of the least important layers."""
    return int((1 - config.squeeze_strength * (1 - P_MIN)) * config.squeeze_budget)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    least = smallest(config)
    if least <= config.squeeze_n_sink + 1:
        need = f"large enough that the smallest layer budget, {least}, exceeds squeeze_n_sink + 1"
        refuse("squeeze_budget", config.squeeze_budget, need, "Raise it, or lower squeeze_n_sink or squeeze_strength.")
    if config.squeeze_resolved_budget is not None:
        check_room(config, "squeeze_resolved_budget", "squeeze_n_sink", extra=1)
    check_capacity(config, "squeeze_budget" if config.squeeze_resolved_budget is None else "squeeze_resolved_budget")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """H2O with half of the budget for the newest tokens; the budget itself is settled across layers."""
    sinks, fixed = config.squeeze_n_sink, config.squeeze_resolved_budget
    policy = Eviction(
        config.squeeze_budget if fixed is None else fixed,
        sinks=sinks,
        recent=lambda budget: max(1, (budget - sinks) // 2),
        score=SummedAttention(),
        per_step=True,
        coordinator=Squeeze(config.squeeze_budget, smallest(config), config.capacity) if fixed is None else None,
    )
    uniform = "fewer than three layers: all keep squeeze_budget tokens"
    notes = (uniform,) if fixed is None and layer.n_layers < 3 else ()
    return Recipe(keys=Stream(), values=Stream(), eviction=policy, notes=notes)
