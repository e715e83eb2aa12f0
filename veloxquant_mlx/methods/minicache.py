"""MiniCache: neighbouring deep layers share directions by spherical interpolation and keep their own norms.

Paper: Liu et al., "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models", NeurIPS 2024,
arXiv:2405.14366. Uncertain: the sign in the paper's retention formula and its constants.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._method import MethodInfo, floats, ints, option


@dataclass
class MiniCacheOptions:
    """Options of ``minicache``."""

    minicache_start_frac: float = option(0.5, "depth from which layers are merged", floats("[0, 1]"))
    minicache_group_size: int = option(2, "layers merged together", ints(2))
    minicache_retention_threshold: float = option(0.9, "cosine below which a token is kept unmerged", floats("[-1, 1]"))
    minicache_slerp_t: float = option(0.5, "place of the merged direction between two layers", floats("[0, 1]"))
    minicache_max_ctx: int = option(8192, "tokens that the shared buffers are first made for", ints(1))


INFO = MethodInfo(
    name="minicache",
    title="MiniCache",
    family="cross-layer",
    paper="MiniCache: KV Cache Compression in Depth Dimension for Large Language Models",
    arxiv="2405.14366",
    venue="NeurIPS 2024",
    options=MiniCacheOptions,
)
