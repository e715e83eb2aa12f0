"""Keep the tokens whose keys have the smallest norm.

Paper: Devoto, Zhao, Scardapane, Minervini, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
EMNLP 2024, arXiv:2406.11430. Paper setting: no sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import MethodInfo, check_room, ints, one_of, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class L2NormOptions:
    """Options of ``knorm``."""

    knorm_budget: int = option(512, "tokens kept per head", ints(1))
    knorm_n_sink: int = option(4, "first tokens that always stay", ints(0))
    knorm_recent: int = option(0, "newest tokens that always stay (at least one does)", ints(0))
    knorm_keep: str = option("low", "which key norms stay", one_of("low", "high"))


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
