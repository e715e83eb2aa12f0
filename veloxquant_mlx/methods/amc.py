"""AMC-adapted tiers: salient tokens at 16 bits, others at 8 or 4 bits, in principal components.

Paper of the tiers: Hu et al., "Adaptive Model Compression (AMC): Saliency-Driven Resource Allocation for
Ultra-Low-Power Transformer Inference", arXiv:2607.10109 (preprint). It is about activations: the use for a KV cache is
our design, and the paper's numbers say nothing about it.

[design] Axes are principal ones of each head (not centred, after RoPE), from ``veloxquant calibrate --method amc`` as
``store``, or fitted on the prompt when it ends: on all of it or its first ``n_calib_tokens`` tokens; a shorter prompt
waits for more. Saliency is not clamped, and shares are
those of the ranked prompt. Its thresholds are kept for all later tokens, which are packed by 32 with as much room per
tier as the shares say: more salient tokens than that are one tier lower, and room that is not needed stays empty. Rows
of the top tier are float16. The tier of a token is held with its key and again with its value. Salient by size is not
important: attention sinks have small values.

``amc_query_alpha`` counts only with ``amc_use_query_saliency``: the mean of the newest 32 queries then takes part,
which after a trim may be queries of tokens that are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..artifacts.calibration import calibrated
from ..codecs.base import ALL
from ..codecs.ranks import RankTiers, mid_rank
from ..core.types import Recipe, Stream
from ..policies.magnitude import Adaptive, MagnitudeTiers
from ._method import FLAG, MethodInfo, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

SEGMENT = 32  # later tokens that are packed together, and tokens that stay exact
FEWEST = 64  # tokens of a fit


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


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """The prompt is one block, ranked; keys and values of a token share its tier."""
    shares, calib = (config.amc_k_high, config.amc_k_mid), config.n_calib_tokens
    dims = {"k": layer.head_dim, "v": layer.value_dim}
    stored = calibrated(
        config, layer, **{f"{part}_basis": (layer.kv_heads, dim, mid_rank(dim)) for part, dim in dims.items()}
    )

    def stream(part: str) -> Stream:
        later, prompt = (
            RankTiers(shares, config.amc_group_size, dim=dims[part], segment=n, fit_rows=calib or ALL)
            for n in (SEGMENT, 0)
        )
        if stored is not None:
            later, prompt = (codec.bind({"basis": stored[f"{part}_basis"][None]}) for codec in (later, prompt))
        return Stream(later, prompt=prompt, window=SEGMENT, chunk=SEGMENT, fit_rows=calib or FEWEST)

    adaptive = None
    if config.amc_adaptive_thresholds:
        assert config.amc_calib_variance is not None
        adaptive = Adaptive(config.amc_gamma, config.amc_calib_variance, config.amc_threshold_window)
    alpha = config.amc_query_alpha if config.amc_use_query_saliency else 1.0
    when = f"the first {calib} tokens" if calib else f"the prompt when it ends, once there are {FEWEST} tokens"
    origin = (
        f"no calibrated axes in store: fitted on {when}" if stored is None else "axes from the calibration artifact"
    )
    return Recipe(
        keys=stream("k"),
        values=stream("v"),
        deferred=True,
        guide=MagnitudeTiers(shares, SEGMENT, alpha, adaptive),
        notes=(origin,),
        from_store=stored is not None,
    )
