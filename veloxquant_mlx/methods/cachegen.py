"""CacheGen: differences to an anchor token, fewer bits in later layers, entropy coding of the saved cache.

Paper: Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving", SIGCOMM 2024,
arXiv:2310.07240. In memory codes keep a fixed width, which attention reads; cache files hold them entropy coded.
Uncertain: group length, anchor bits and bin widths of the paper (its code has no differences at all). Scales per token
and head, layer groups of one bit less each, and frequency tables that go with the codes are our choices.

Differences pay only where the tokens of a group are much alike (correlation above about 0.9 at equal step). On
SmolLM2-135M they do: 3.75 bits per number at rest for a KL of 0.011, where tokens alone need 3.96 for 0.021; fewer bits
in later layers do not: 0.44 against 0.14 at 3.49 bits held (``benchmarks/at_rest.py`` measures both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.anchored import ANCHOR_BITS, Anchored
from ..codecs.symmetric import TokenSymmetric
from ..core.types import Recipe, Stream
from ._method import FLAG, MethodInfo, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

MIN_BITS = 2


@dataclass
class CacheGenOptions:
    """Options of ``cachegen``."""

    cachegen_bits: int = option(4, "bits of the first group of layers; each later group has one less", ints(2, 8))
    cachegen_group_size: int = option(32, "tokens per anchor", ints(2))
    cachegen_use_delta: bool = option(True, "code differences to the anchor", FLAG)
    cachegen_per_channel: bool = option(True, "in files, a frequency table per channel where that pays", FLAG)
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


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if not config.cachegen_use_delta and config.cachegen_group_size != CacheGenOptions.cachegen_group_size:
        valid = f"its default {CacheGenOptions.cachegen_group_size} with cachegen_use_delta=False"
        refuse("cachegen_group_size", config.cachegen_group_size, valid, "Without differences there are no groups.")


def resolved_bits(config: FlatConfig, layer: LayerInfo) -> int:
    """The layer's bits: one less in every later group of layers, at least 2."""
    if config.cachegen_resolved_bits is not None:
        return config.cachegen_resolved_bits
    part = layer.rank * config.cachegen_layer_groups // layer.n_layers
    return max(MIN_BITS, config.cachegen_bits - part)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys and values alike. A group is packed when it is whole; until then its tokens are held as they came."""
    bits, group, per_channel = resolved_bits(config, layer), config.cachegen_group_size, config.cachegen_per_channel

    def stream(dim: int) -> Stream:
        if config.cachegen_use_delta:
            return Stream(Anchored(bits, group, dim=dim, per_channel=per_channel), chunk=group)
        return Stream(TokenSymmetric(bits, dim=dim, per_channel=per_channel))

    how = f"differences to an {ANCHOR_BITS}-bit anchor every {group} tokens" if config.cachegen_use_delta else "tokens"
    return Recipe(
        keys=stream(layer.head_dim),
        values=stream(layer.value_dim),
        notes=(f"{bits}-bit {how}; fixed width in memory, entropy coded in cache files",),
    )
