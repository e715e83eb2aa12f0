"""StreamingLLM: the first tokens (attention sinks) and a sliding window, with positions counted inside the cache.

Paper: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, arXiv:2309.17453. Rows go
after a call, so a chunk of a prompt sees its own older tokens beyond the window, which the paper's mask hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..models.rope import UnknownRotation
from ..policies.eviction import Eviction
from ._method import MethodInfo, ints, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class StreamingLLMOptions:
    """Options of ``streaming_llm``."""

    stream_n_sink: int = option(4, "first tokens that always stay", ints(0))
    stream_window_size: int = option(512, "newest tokens that stay", ints(1))


NO_ROPE = "no rotary module at this layer or at hand: sink keys keep the positions that they came with"

INFO = MethodInfo(
    name="streaming_llm",
    title="StreamingLLM",
    family="eviction",
    paper="Efficient Streaming Language Models with Attention Sinks",
    arxiv="2309.17453",
    venue="ICLR 2024",
    needs="rope",
    options=StreamingLLMOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.capacity is not None:
        kept = config.stream_n_sink + config.stream_window_size
        valid = f"None: at most stream_n_sink + stream_window_size = {kept} tokens stay"
        refuse("capacity", config.capacity, valid, "This method is bounded already; set its two sizes instead.")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Rows beyond sinks and window go after every call; sink keys are moved along, so the cache counts positions."""
    if isinstance(layer.rope, UnknownRotation):
        remedy = "Use a method that keeps original positions, such as 'snapkv', or a model with a plain rotary module."
        refuse("method", INFO.name, f"one that moves no keys, for this layer: {layer.rope.reason}", remedy)
    sinks, window = config.stream_n_sink, config.stream_window_size
    return Recipe(
        keys=Stream(bounded=True),
        values=Stream(bounded=True),
        eviction=Eviction(sinks + window, sinks, window, bounded=True, rotation=layer.rope),
        notes=() if layer.rope else (NO_ROPE,),
    )
