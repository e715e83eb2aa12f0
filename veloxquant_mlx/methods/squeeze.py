"""SqueezeAttention: layers whose attention changes the hidden state little give tokens to the others.

Paper: Wang, Cui, Gan, "SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal Budget",
ICLR 2025, arXiv:2404.04793.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import MethodInfo, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig

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


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    least = int((1 - config.squeeze_strength * (1 - P_MIN)) * config.squeeze_budget)
    if least <= config.squeeze_n_sink + 1:
        need = f"large enough that the smallest layer budget, {least}, exceeds squeeze_n_sink + 1"
        refuse("squeeze_budget", config.squeeze_budget, need, "Raise it, or lower squeeze_n_sink or squeeze_strength.")
