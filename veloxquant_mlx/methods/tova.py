"""TOVA: at each step drop the token that the newest query attends to least.

Paper: Oren, Hassid, Yarden, Adi, Schwartz, "Transformers are Multi-State RNNs", EMNLP 2024, arXiv:2401.06104.
The mean over all heads of the layer decides, so that all of them keep the same tokens. The prompt is cut once, by its
last query. Protected sinks (paper: 0) and the newest token's protection are additions. Where a model's heads are split
over processes, each process takes the mean over its own heads, so that processes may keep different tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..policies.eviction import Eviction
from ..policies.observed import LastQuery
from ._method import BACKEND, MethodInfo, check_backend, check_capacity, check_room, ints, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class TOVAOptions:
    """Options of ``tova``."""

    tova_budget: int = option(512, "tokens kept", ints(2))
    tova_n_sink: int = option(4, "first tokens that always stay (paper: 0)", ints(0))
    tova_backend: str = option("auto", "how scores are computed; every choice selects the same tokens", BACKEND)


INFO = MethodInfo(
    name="tova",
    title="TOVA",
    family="eviction",
    paper="Transformers are Multi-State RNNs",
    arxiv="2401.06104",
    venue="EMNLP 2024",
    needs="real queries",
    options=TOVAOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "tova_budget", "tova_n_sink", extra=1)
    check_capacity(config, "tova_budget")
    check_backend(config, "tova_backend")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """One cut at the end of the prompt, then one row less for every row more; all kv heads keep the same rows."""
    score = LastQuery(decoded=config.tova_backend == "reference")
    policy = Eviction(config.tova_budget, sinks=config.tova_n_sink, recent=1, score=score, per_step=True)
    return Recipe(keys=Stream(), values=Stream(), eviction=policy)
