"""Q-Filters: score keys by their projection on the main direction of the queries of their head.

Paper: Godey et al., "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", arXiv:2503.02812.
Protected sinks are our addition (paper: qfilters_n_sink = 0), as is the newest token, which always stays. Every head
drops one token for each new one after the prompt. Uncertain: the venue.

Filters belong to a model: make them once with ``veloxquant calibrate --method qfilters`` and pass them as ``store``.
Without them they are fitted on the real queries of the sequence at hand, when it first has tokens to drop [design]:
they then depend on the context, and the receipt says so. Keys never stand in for queries: the sign would be lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..artifacts.calibration import calibrated
from ..core.types import Recipe, Stream
from ..policies.projection import FittedProjection, Projection, WatchedEviction
from ._method import MethodInfo, check_capacity, check_room, floats, ints, one_of, option, optional

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class QFiltersOptions:
    """Options of ``qfilters``."""

    qfilters_budget: int = option(512, "tokens kept per head", ints(1))
    qfilters_n_sink: int = option(4, "first tokens that always stay", ints(0))
    qfilters_recent: int = option(0, "newest tokens that always stay (at least one does)", ints(0))
    qfilters_calib_tokens: int = option(128, "fewest queries that a filter is fitted on, if none is stored", ints(1))
    qfilters_sign: int = option(1, "-1 turns the score round (ablation)", one_of(1, -1))
    qfilters_min_retention: float | None = option(
        0.9, "share of tokens kept below which to report", optional(floats("(0, 1]"))
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
    check_capacity(config, "qfilters_budget")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """One cut at the end of the prompt, then one row less for every row more; each kv head keeps its own rows."""
    found = calibrated(config, layer, filters=(layer.kv_heads, layer.head_dim))
    if found is not None:
        score, note = Projection(found["filters"], config.qfilters_sign), "filters from the calibration artifact"
    else:
        score = FittedProjection(max(config.qfilters_calib_tokens, layer.head_dim), config.qfilters_sign)
        note = "no calibrated filters in store: fitted on this sequence's own queries, so they depend on the context"
    how, floor = config.qfilters_on_low_retention, config.qfilters_min_retention
    policy = WatchedEviction(
        config.qfilters_budget,
        sinks=config.qfilters_n_sink,
        recent=max(config.qfilters_recent, 1),
        score=score,
        per_step=True,
        floor=0.0 if floor is None or how == "ignore" else floor,
        how="raise" if how == "raise" else "warn",
    )
    return Recipe(keys=Stream(), values=Stream(), eviction=policy, notes=(note,), from_store=found is not None)
