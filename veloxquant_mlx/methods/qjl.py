"""QJL: signs of a random projection of the keys, affine values.

Paper: Zandieh, Daliri, Han, "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead",
AAAI 2025, arXiv:2406.03482. Paper setting: jl_dim = 2 D, n_outlier_channels = 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._method import BITS, MethodInfo, check_outliers, ints, optional

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig

INFO = MethodInfo(
    name="qjl",
    title="QJL",
    family="rotation",
    paper="QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead",
    arxiv="2406.03482",
    venue="AAAI 2025",
    standalone=True,
    reads={
        "bit_width_inlier": BITS,
        "jl_dim": optional(ints(1)),
        "n_outlier_channels": optional(ints(0)),
        "residual_length": ints(0),
    },
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_outliers(config)
