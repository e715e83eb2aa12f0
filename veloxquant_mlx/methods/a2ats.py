"""A2ATS: a vector-quantised index of keys before RoPE tells which tokens a query reads; keys and values stay whole.

Paper: He et al., "A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position Embedding and Query-Aware
Vector Quantization", Findings of ACL 2025, arXiv:2502.12665.
"""

# ruff: noqa: RUF009 (option is a dataclass field that carries metadata)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._method import ARRAY, FLAG, MethodInfo, Valid, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class A2ATSOptions:
    """Options of ``a2ats``."""

    a2ats_codebook_bits: int = option(8, "bits of a code", ints(1, 16))
    a2ats_sub_dim: int = option(8, "numbers per code", ints(1))
    a2ats_window: int = option(128, "newest tokens that are always read", ints(0))
    a2ats_b: int = option(2048, "distance beyond which positions count as equal", ints(0))
    a2ats_use_query_aware: bool = option(True, "weigh the fit by the queries", FLAG)
    a2ats_beta: float = option(0.5, "shrinkage of the query statistics", floats("[0, 1]"))
    a2ats_retrieval_fraction: float = option(0.2, "share of tokens that a query reads", floats("(0, 1]"))
    a2ats_rope_base: float = option(10000.0, "RoPE base where no model is at hand", floats("(1, inf)"))
    a2ats_rope_scaling: Any = option(
        None,
        "RoPE scaling of the model's configuration",
        Valid("None or a dict", lambda v: v is None or isinstance(v, dict)),
    )
    a2ats_query_h: Any = option(None, "second moments of the queries", ARRAY)
    a2ats_codebook: Any = option(None, "codebook of the keys", ARRAY)


INFO = MethodInfo(
    name="a2ats",
    title="A2ATS",
    family="retrieval",
    paper="A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position Embedding and Query-Aware "
    "Vector Quantization",
    arxiv="2502.12665",
    venue="Findings of ACL 2025",
    needs="real queries, calibration, rope",
    reads={"n_calib_tokens": optional(ints(1))},
    options=A2ATSOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    sub_dim, book = config.a2ats_sub_dim, config.a2ats_codebook
    if config.head_dim % sub_dim:
        refuse("a2ats_sub_dim", sub_dim, f"a divisor of head_dim = {config.head_dim}", "Choose a divisor.")
    if book is not None and book.shape[-1] != sub_dim:
        valid = f"a codebook whose last axis is a2ats_sub_dim = {sub_dim}"
        refuse("a2ats_codebook of shape", tuple(book.shape), valid, "Fit it for this a2ats_sub_dim.")
