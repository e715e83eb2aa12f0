"""Q-Filters: score keys by their projection on the main direction of the queries of their head.

Paper: Godey et al., "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", arXiv:2503.02812.
Uncertain: the venue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ._method import MethodInfo, check_room, floats, ints, one_of, option, optional

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class QFiltersOptions:
    """Options of ``qfilters``."""

    qfilters_budget: int = option(512, "tokens kept per head", ints(1))
    qfilters_n_sink: int = option(4, "first tokens that always stay", ints(0))
    qfilters_recent: int = option(0, "newest tokens that always stay (at least one does)", ints(0))
    qfilters_calib_tokens: int = option(128, "queries that a filter is fitted on where none is stored", ints(1))
    qfilters_sign: int = option(1, "-1 turns the score round (ablation)", one_of(1, -1))
    qfilters_min_retention: float | None = option(
        0.9, "share of kept tokens below which to report", optional(floats("(0, 1]"))
    )
    qfilters_on_low_retention: Literal["warn", "raise", "ignore"] = option(
        "warn", "how to report it", one_of("warn", "raise", "ignore")
    )


INFO = MethodInfo(
    name="qfilters",
    title="Q-Filters",
    family="eviction",
    paper="Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression",
    arxiv="2503.02812",
    needs="calibration",
    options=QFiltersOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "qfilters_budget", "qfilters_n_sink", "qfilters_recent", extra=int(config.qfilters_recent == 0))
