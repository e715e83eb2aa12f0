"""Keep the tokens whose keys have the smallest norm.

Paper: Devoto, Zhao, Scardapane, Minervini, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
EMNLP 2024, arXiv:2406.11430. Protected sinks are our addition (paper: knorm_n_sink = 0), as is the newest token, which
always stays. Every head drops one token for each new one after the prompt.

Without ``knorm_recent`` (32 to 64 for a chat) the question at the end of a long prompt may be dropped. Models that norm
their keys (Qwen3, Gemma 3) give nearly constant lengths: the signal is weak there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..policies.eviction import Eviction
from ..policies.norms import KeyNorm
from ._method import MethodInfo, check_capacity, check_room, ints, one_of, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class L2NormOptions:
    """Options of ``knorm``."""

    knorm_budget: int = option(512, "tokens kept per head", ints(1))
    knorm_n_sink: int = option(4, "first tokens that always stay", ints(0))
    knorm_recent: int = option(0, "newest tokens that always stay (at least one does)", ints(0))
    knorm_keep: str = option("low", "which key norms stay", one_of("low", "high"))


# Layers (counted among those that the method serves) that keep everything. The authors recommend (0, 1); nothing is
# skipped here, as in the comparisons of others, since no field exists for it.
SKIP_LAYERS: tuple[int, ...] = ()

INFO = MethodInfo(
    name="knorm",
    title="L2 norm",
    family="eviction",
    paper="A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    arxiv="2406.11430",
    venue="EMNLP 2024",
    options=L2NormOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "knorm_budget", "knorm_n_sink", "knorm_recent", extra=int(config.knorm_recent == 0))
    check_capacity(config, "knorm_budget")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """One cut at the end of the prompt, then one row less for every row more; each kv head keeps its own rows."""
    if layer.rank in SKIP_LAYERS:
        return Recipe(keys=Stream(), values=Stream(), notes=("keeps everything: one of SKIP_LAYERS",))
    score = KeyNorm(sign=-1 if config.knorm_keep == "low" else 1)
    recent = max(config.knorm_recent, 1)
    policy = Eviction(config.knorm_budget, sinks=config.knorm_n_sink, recent=recent, score=score, per_step=True)
    return Recipe(keys=Stream(), values=Stream(), eviction=policy)
