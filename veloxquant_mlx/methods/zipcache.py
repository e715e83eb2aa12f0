"""ZipCache: tokens that real queries find salient get more bits than the rest.

Paper: He et al., "ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification", NeurIPS
2024, arXiv:2405.14256.

The prompt is one segment, sealed when it ends; later tokens wait for a whole segment of 96, 128 or 160 (the paper's
gap: 100), whichever pads the two tiers least: at a share of 0.2, tiers of 32 and 128 fill whole words and groups.
Probes are 5 % of the positions, drawn by the seed, and the newest 5 %. Ours: each head has tiers of its own, so that
values have parameters per token and head (the authors' code: per token, over all heads, with the same tiers); key
parameters are per ``zipcache_group_size`` tokens of a tier (paper: one group, what a huge size gives); probes of a
segment are those among its own tokens (the authors' code: the newest query). Tokens that a trim brings back have no
probes of their own any more: those that came first are taken for salient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.tiers import TieredKeys, TieredValues, segment_length
from ..core.types import Recipe, Stream
from ..policies.saliency import ProbeSaliency
from ._method import BITS, FLAG, MethodInfo, floats, ints, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class ZipCacheOptions:
    """Options of ``zipcache``."""

    zipcache_hi_bits: int = option(4, "bits of salient tokens", BITS)
    zipcache_lo_bits: int = option(2, "bits of the other tokens", BITS)
    zipcache_hi_fraction: float = option(0.2, "share of salient tokens", floats("[0, 1]"))
    zipcache_group_size: int = option(32, "tokens per key group", ints(2))
    zipcache_quantize_values: bool = option(True, "False: values stay in the model's dtype", FLAG)


INFO = MethodInfo(
    name="zipcache",
    title="ZipCache",
    family="group quantization",
    paper="ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification",
    arxiv="2405.14256",
    venue="NeurIPS 2024",
    needs="real queries",
    options=ZipCacheOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.zipcache_lo_bits > config.zipcache_hi_bits:
        valid = f"<= zipcache_hi_bits = {config.zipcache_hi_bits}"
        refuse("zipcache_lo_bits", config.zipcache_lo_bits, valid, "Swap the two.")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys and values in the same segments; values stay floats where the configuration says so."""
    bits, fraction = (config.zipcache_hi_bits, config.zipcache_lo_bits), config.zipcache_hi_fraction
    group = config.zipcache_group_size
    segment = segment_length(fraction, bits, group)
    prompt, later = (TieredKeys(bits, fraction, group, n) for n in (0, segment))
    values = Stream()
    if config.zipcache_quantize_values:
        codecs = [TieredValues(bits, fraction, n, dim=layer.value_dim) for n in (0, segment)]
        values = Stream(codecs[1], prompt=codecs[0], chunk=segment)
    return Recipe(
        keys=Stream(later, prompt=prompt, chunk=segment),
        values=values,
        deferred=True,
        guide=ProbeSaliency(seed=config.seed - layer.index),  # the same probes in all layers
    )
