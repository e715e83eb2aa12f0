"""KVQuant: non-uniform levels per channel for keys before RoPE, sparse outliers kept exact.

Paper: Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization", NeurIPS
2024, arXiv:2401.18079. ``kvquant_group_size`` is the token block of our storage [design].
"""

from __future__ import annotations

from dataclasses import dataclass

from ._method import MethodInfo, floats, ints, option, optional


@dataclass
class KVQuantOptions:
    """Options of ``kvquant``."""

    kvquant_bits: int = option(3, "bits per number", ints(1, 5))
    kvquant_outlier_fraction: float = option(0.01, "share of numbers stored exactly; 0: none", floats("[0, 0.5)"))
    kvquant_group_size: int = option(32, "tokens packed together", ints(2))
    kvquant_lloyd_iters: int = option(8, "steps of the fit of the levels", ints(1))
    kvquant_refit_interval: int = option(0, "tokens between fits; 0: never again", ints(0))
    kvquant_n_sink: int = option(1, "first tokens that stay exact", ints(0))


INFO = MethodInfo(
    name="kvquant",
    title="KVQuant",
    family="group quantization",
    paper="KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization",
    arxiv="2401.18079",
    venue="NeurIPS 2024",
    needs="rope",
    reads={"n_calib_tokens": optional(ints(1))},
    options=KVQuantOptions,
)
