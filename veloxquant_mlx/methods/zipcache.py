"""ZipCache: tokens that real queries find salient get more bits than the rest.

Paper: He et al., "ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification", NeurIPS
2024, arXiv:2405.14256.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import BITS, FLAG, MethodInfo, floats, ints, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


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
