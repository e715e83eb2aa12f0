"""PyramidKV: SnapKV's selection with more tokens in early layers and fewer in late ones.

Paper: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
arXiv:2406.02069. Paper setting: pyramid_beta = 20. Uncertain: the venue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import BACKEND, MethodInfo, check_room, floats, ints, option, optional

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig

# Observation window of SnapKV (arXiv:2404.14469), which the public options have no field for.
OBS_WINDOW = 32


@dataclass
class PyramidKVOptions:
    """Options of ``pyramidkv``."""

    pyramid_budget: int = option(512, "mean tokens kept per head and layer", ints(1))
    pyramid_backend: str = option("reference", "how scores are computed; every choice selects the same tokens", BACKEND)
    pyramid_n_sink: int = option(4, "first tokens that always stay", ints(0))
    pyramid_beta: float = option(2.0, "steepness of the pyramid; 1: flat", floats("[1, inf)"))
    pyramid_resolved_budget: int | None = option(None, "tokens of this layer; None: by the pyramid", optional(ints(1)))


INFO = MethodInfo(
    name="pyramidkv",
    title="PyramidKV",
    family="eviction",
    paper="PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
    arxiv="2406.02069",
    needs="real queries",
    options=PyramidKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "pyramid_budget", "pyramid_n_sink", extra=OBS_WINDOW)
    if config.pyramid_resolved_budget is not None:
        check_room(config, "pyramid_resolved_budget", "pyramid_n_sink", extra=OBS_WINDOW)
