"""XQuant: layers in a group share the codes of their first layer and keep scales and offsets of their own.

Paper: Yang et al., "XQuant: Achieving Ultra-Low Bit KV Cache Quantization with Cross-Layer Compression", EMNLP 2025,
arXiv:2510.11236. Not the XQuant of arXiv:2508.10395. Paper setting: xquant_residual_bits = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._method import BITS, MethodInfo, ints, one_of, option


@dataclass
class XQuantOptions:
    """Options of ``xquant``."""

    xquant_group_size: int = option(2, "layers that share codes", ints(2))
    xquant_base_bits: int = option(2, "bits of the shared codes", BITS)
    xquant_residual_bits: int = option(
        4, "bits of each layer's own residual; 0: none (paper)", one_of(0, 1, 2, 3, 4, 5, 6, 8)
    )
    xquant_group_quant_size: int = option(32, "tokens per key group and channels per value group", ints(2))
    xquant_max_ctx: int = option(8192, "tokens that the shared buffers are first made for", ints(1))


INFO = MethodInfo(
    name="xquant",
    title="XQuant",
    family="cross-layer",
    paper="XQuant: Achieving Ultra-Low Bit KV Cache Quantization with Cross-Layer Compression",
    arxiv="2510.11236",
    venue="EMNLP 2025",
    reads={"residual_length": ints(0)},
    options=XQuantOptions,
)
