"""AMC-adapted tiers: salient tokens at 16 bits, others at 8 or 4 bits, in principal components.

Paper of the tiers: Hu et al., "Adaptive Model Compression (AMC): Saliency-Driven Resource Allocation for
Ultra-Low-Power Transformer Inference", arXiv:2607.10109 (preprint). It is about activations: the use for a KV cache is
our design, and the paper's numbers say nothing about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import FLAG, MethodInfo, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class AMCOptions:
    """Options of ``amc``."""

    amc_k_high: float = option(0.2, "share of tokens in the top tier", floats("[0, 1]"))
    amc_k_mid: float = option(0.3, "share of tokens in the middle tier", floats("[0, 1]"))
    amc_use_query_saliency: bool = option(False, "let real queries take part in the saliency", FLAG)
    amc_query_alpha: float = option(0.5, "weight of the queries", floats("[0, 1]"))
    amc_adaptive_thresholds: bool = option(False, "let the thresholds follow the variance", FLAG)
    amc_threshold_window: int = option(64, "tokens of the running variance", ints(2))
    amc_gamma: float = option(0.1, "how fast the thresholds follow", floats("[0, inf)"))
    amc_calib_variance: float | None = option(None, "variance of the calibration text", optional(floats("(0, inf)")))
    amc_group_size: int = option(32, "numbers per group", ints(1))


INFO = MethodInfo(
    name="amc",
    title="AMC-adapted tiers",
    family="tiered",
    paper="Adaptive Model Compression (AMC): Saliency-Driven Resource Allocation for Ultra-Low-Power Transformer "
    "Inference",
    arxiv="2607.10109",
    needs="real queries (amc_use_query_saliency only)",
    reads={"n_calib_tokens": optional(ints(1))},
    options=AMCOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.amc_k_high + config.amc_k_mid > 1:
        refuse("amc_k_mid", config.amc_k_mid, f"<= 1 - amc_k_high = {1 - config.amc_k_high:g}", "Lower one of the two.")
    if config.amc_adaptive_thresholds and config.amc_calib_variance is None:
        valid = "a number > 0 while amc_adaptive_thresholds is on"
        refuse("amc_calib_variance", None, valid, "Measure it on a calibration text or switch the thresholds off.")
