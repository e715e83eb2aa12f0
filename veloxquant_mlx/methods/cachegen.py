"""CacheGen: differences to an anchor token, fewer bits in later layers, entropy coding of the saved cache.

Paper: Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving", SIGCOMM 2024,
arXiv:2310.07240. Uncertain: group length, anchor bits and bin widths of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._method import FLAG, MethodInfo, ints, option, optional


@dataclass
class CacheGenOptions:
    """Options of ``cachegen``."""

    cachegen_bits: int = option(4, "mean bits over the layers", ints(2, 8))
    cachegen_group_size: int = option(32, "tokens per anchor", ints(2))
    cachegen_use_delta: bool = option(True, "code differences to the anchor", FLAG)
    cachegen_per_channel: bool = option(True, "one scale per channel instead of per token", FLAG)
    cachegen_layer_groups: int = option(3, "groups of layers with bits of their own", ints(1))
    cachegen_resolved_bits: int | None = option(None, "bits of this layer; None: by its group", optional(ints(2, 8)))


INFO = MethodInfo(
    name="cachegen",
    title="CacheGen",
    family="entropy coding",
    paper="CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving",
    arxiv="2310.07240",
    venue="SIGCOMM 2024",
    options=CacheGenOptions,
)
