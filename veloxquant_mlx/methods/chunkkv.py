"""ChunkKV: keep or drop whole chunks of neighbouring tokens; layers may share the selection.

Paper: Liu et al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
NeurIPS 2025, arXiv:2502.00299. Paper setting: chunks of 10, no sinks. Uncertain: that 2 layers share a selection there.

The mean of a chunk (the paper: the sum) does not punish a last chunk that is short. Chunks are taken while they fit: up
to chunkkv_chunk_size - 1 tokens of the budget stay unused. Scoring by key norms and choosing again on later turns of a
chat are our extensions. Layers share a selection in models made ready by ``for_model``; caches that are fed by hand
choose for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..coordinators.reuse import Reuse
from ..core.types import Recipe, Stream
from ..policies.chunks import Chunks, HeadMean, ShortKeys
from ..policies.eviction import Eviction
from ..policies.scores import WindowAttention
from ._method import MethodInfo, check_capacity, check_room, ints, one_of, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

# Observation window of SnapKV (arXiv:2404.14469), which the public options have no field for.
OBS_WINDOW = 32


@dataclass
class ChunkKVOptions:
    """Options of ``chunkkv``."""

    chunkkv_budget: int = option(512, "tokens kept per head", ints(1))
    chunkkv_chunk_size: int = option(8, "tokens per chunk", ints(1))
    chunkkv_n_sink: int = option(4, "first tokens that always stay", ints(0))
    chunkkv_score: str = option("attn_mass", "what makes a chunk important", one_of("attn_mass", "key_norm"))
    chunkkv_reuse_layers: int = option(1, "layers that share a selection; 1: none", ints(1))


INFO = MethodInfo(
    name="chunkkv",
    title="ChunkKV",
    family="eviction",
    paper="ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
    arxiv="2502.00299",
    venue="NeurIPS 2025",
    needs="real queries",
    options=ChunkKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "chunkkv_budget", "chunkkv_n_sink", "chunkkv_chunk_size", extra=OBS_WINDOW - 1)
    check_capacity(config, "chunkkv_budget")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """One choice of chunks at the end of the prompt for all heads, and for ``chunkkv_reuse_layers`` layers."""
    sinks, shared = config.chunkkv_n_sink, config.chunkkv_reuse_layers > 1
    by_attention = config.chunkkv_score == "attn_mass"
    policy = Eviction(
        config.chunkkv_budget,
        sinks=sinks,
        recent=OBS_WINDOW,
        score=HeadMean(WindowAttention(OBS_WINDOW, kernel=1)) if by_attention else ShortKeys(),
        select=Chunks(config.chunkkv_chunk_size, sinks),
        coordinator=Reuse(config.chunkkv_reuse_layers) if shared else None,
    )
    alone = "one layer by itself: it chooses its own tokens, nothing is shared"
    notes = (alone,) if shared and layer.n_layers == 1 else ()
    return Recipe(keys=Stream(), values=Stream(), eviction=policy, notes=notes)
