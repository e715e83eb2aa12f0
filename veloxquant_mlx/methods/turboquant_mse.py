"""TurboQuant, mean-squared-error variant: a random rotation makes every coordinate alike, one scalar codebook fits all.

Paper: Zandieh, Daliri, Hadian, Mirrokni, "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
ICLR 2026, arXiv:2504.19874. No official code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._method import BITS, FLAG, TWO_STREAM, MethodInfo, check_two_stream

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig

INFO = MethodInfo(
    name="turboquant_mse",
    title="TurboQuant (MSE)",
    family="rotation",
    paper="TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
    arxiv="2504.19874",
    venue="ICLR 2026",
    standalone=True,
    reads={"bit_width_inlier": BITS, "enable_fused_query_dot": FLAG, **TWO_STREAM},
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_two_stream(config)
