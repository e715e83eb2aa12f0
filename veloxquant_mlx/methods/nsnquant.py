"""NSNQuant: normalise, shift, normalise, rotate, then one universal vector codebook.

Paper: Son, Choi, Yoo, "NSNQuant: A Double Normalization Approach for Calibration-Free Low-Bit Vector Quantization of KV
Cache", NeurIPS 2025, arXiv:2505.18231.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._method import MethodInfo, ints, one_of, option


@dataclass
class NSNQuantOptions:
    """Options of ``nsnquant``."""

    nsn_bits: int = option(2, "bits per number", one_of(1, 2))
    nsn_residual_length: int = option(64, "tokens per window of normalisation", ints(1))
    nsn_codebook_size: int = option(256, "entries of the codebook", one_of(*(2**n for n in range(1, 17))))
    nsn_subvector_dim: int = option(8, "numbers per code", ints(1))
    nsn_seed: int = option(1234, "seed of the codebook", ints(0))
    nsn_max_ctx: int = option(8192, "tokens that the buffers are first made for", ints(1))


INFO = MethodInfo(
    name="nsnquant",
    title="NSNQuant",
    family="vector quantization",
    paper="NSNQuant: A Double Normalization Approach for Calibration-Free Low-Bit Vector Quantization of KV Cache",
    arxiv="2505.18231",
    venue="NeurIPS 2025",
    options=NSNQuantOptions,
)
