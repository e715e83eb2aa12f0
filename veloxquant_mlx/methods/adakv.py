"""Ada-KV-style bits per head over KIVI: heads that matter more get more bits at a fixed mean.

Paper of the idea (an eviction method): Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget
Allocation for Efficient LLM Inference", NeurIPS 2025, arXiv:2407.11550. Bits instead of tokens are our design.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import BITS, MethodInfo, floats, ints, one_of, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class AdaKVOptions:
    """Options of ``adakv``."""

    adakv_target_avg_bits: float = option(2.5, "mean bits over the heads", floats("[1, 8]"))
    adakv_lo_bit: int = option(2, "fewest bits of a head", BITS)
    adakv_mid_bit: int = option(3, "middle bits of a head", BITS)
    adakv_hi_bit: int = option(4, "most bits of a head", BITS)
    adakv_group_size: int = option(32, "tokens per key group and channels per value group", ints(2))
    adakv_update_interval: int = option(1, "tokens between allocations", ints(1))
    adakv_importance: str = option(
        "norm_variance", "what makes a head important", one_of("norm_variance", "attention_entropy")
    )
    adakv_obs_window: int = option(32, "queries observed for attention_entropy", ints(1))


INFO = MethodInfo(
    name="adakv",
    title="Ada-KV-style bits per head",
    family="group quantization",
    paper="Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
    arxiv="2407.11550",
    venue="NeurIPS 2025",
    needs="real queries (attention_entropy only)",
    reads={"residual_length": ints(0)},
    options=AdaKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    lo, mid, hi = config.adakv_lo_bit, config.adakv_mid_bit, config.adakv_hi_bit
    if not lo <= mid <= hi:
        refuse("adakv_mid_bit", mid, f"in {lo}..{hi}, adakv_lo_bit to adakv_hi_bit", "Order the three bit-widths.")
    if not lo <= config.adakv_target_avg_bits <= hi:
        valid = f"in [{lo}, {hi}], adakv_lo_bit to adakv_hi_bit"
        refuse("adakv_target_avg_bits", config.adakv_target_avg_bits, valid, "Move the target or the bit-widths.")
