"""VecInfer: smoothed and Hadamard-rotated keys, product vector quantisation of keys and values.

Paper: Yao et al., "VecInfer: Efficient LLM Inference with Low-Bit KV Cache via Outlier-Suppressed Vector
Quantization", ACL 2026, arXiv:2510.06175. ``bit_width_inlier`` has no meaning here and is accepted without effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import ARRAY, MethodInfo, Valid, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class VecInferOptions:
    """Options of ``vecinfer``."""

    key_sub_dim: int = option(4, "numbers per key code", ints(1))
    value_sub_dim: int = option(8, "numbers per value code", ints(1))
    key_codebook_bits: int = option(12, "bits of a key code", ints(1, 16))
    value_codebook_bits: int = option(8, "bits of a value code", ints(1, 16))
    residual_length: int = option(128, "newest tokens that stay exact", ints(0))


INFO = MethodInfo(
    name="vecinfer",
    title="VecInfer",
    family="vector quantization",
    paper="VecInfer: Efficient LLM Inference with Low-Bit KV Cache via Outlier-Suppressed Vector Quantization",
    arxiv="2510.06175",
    venue="ACL 2026",
    needs="calibration",
    reads={
        "bit_width_inlier": Valid("anything", lambda v: True),
        "n_calib_tokens": optional(ints(1)),
        "smooth_factors": ARRAY,
        "key_codebook": ARRAY,
        "value_codebook": ARRAY,
    },
    options=VecInferOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    for side in ("key", "value"):
        sub_dim, book = getattr(config, f"{side}_sub_dim"), getattr(config, f"{side}_codebook")
        if config.head_dim % sub_dim:
            valid = f"a divisor of head_dim = {config.head_dim}"
            refuse(f"{side}_sub_dim", sub_dim, valid, "Codebooks are made for one head size: choose a divisor.")
        shape = (2 ** getattr(config, f"{side}_codebook_bits"), sub_dim)
        if book is not None and tuple(book.shape[-2:]) != shape:
            valid = f"a codebook whose last two axes are {shape}"
            refuse(f"{side}_codebook of shape", tuple(book.shape), valid, "Fit it for these bits and this sub_dim.")
