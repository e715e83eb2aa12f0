"""ChunkKV: keep or drop whole chunks of neighbouring tokens; layers may share the selection.

Paper: Liu et al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
NeurIPS 2025, arXiv:2502.00299. Paper setting: chunks of 10, no sinks. Uncertain: that 2 layers share a selection there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import MethodInfo, check_room, ints, one_of, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig

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
