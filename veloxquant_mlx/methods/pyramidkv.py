"""PyramidKV: SnapKV's selection with more tokens in early layers and fewer in late ones.

Paper: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
arXiv:2406.02069. Paper setting: pyramid_beta = 20, no sinks. Uncertain: the venue. The window of 32 and the kernel of 5
are the reference code's; budgets count the window in and sum exactly to their mean times the layers, which that code
does not reach. The pyramid follows from the tokens seen when a prompt ends: later turns of a chat choose again (our
extension) by the pyramid of the whole length. Without a model's layers a cache keeps ``pyramid_budget``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..policies.budgets import Pyramid
from ..policies.eviction import Eviction
from ..policies.scores import WindowAttention
from ._method import BACKEND, MethodInfo, check_backend, check_capacity, check_room, floats, ints, option, optional
from .snapkv import KERNEL_SIZE, POOLING

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

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
    check_capacity(config, "pyramid_budget" if config.pyramid_resolved_budget is None else "pyramid_resolved_budget")
    check_backend(config, "pyramid_backend")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """SnapKV with a budget that depends on the layer's depth and the prompt's length."""
    sinks, window = config.pyramid_n_sink, OBS_WINDOW
    mean, beta, least = config.pyramid_budget, config.pyramid_beta, sinks + window + 1
    pyramid = Pyramid(layer.rank, layer.n_layers, mean, beta, window, least, config.capacity)
    score = WindowAttention(window, KERNEL_SIZE, POOLING, decoded=config.pyramid_backend == "reference")
    policy = Eviction(config.pyramid_resolved_budget or pyramid, sinks=sinks, score=score)
    return Recipe(keys=Stream(), values=Stream(), eviction=policy)
