"""PolarQuant: recursive polar coordinates of rotated vectors, one codebook per level of angles.

Paper: Han, Kacham, Karbasi, Mirrokni, Zandieh, "PolarQuant: Quantizing KV Caches with Polar Transformation",
arXiv:2502.02617. Not the other PolarQuant (arXiv:2502.00527), which quantises RoPE pairs of keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._method import MethodInfo, ints, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig

INFO = MethodInfo(
    name="polar",
    title="PolarQuant",
    family="rotation",
    paper="PolarQuant: Quantizing KV Caches with Polar Transformation",
    arxiv="2502.02617",
    standalone=True,
    reads={"bit_width_inlier": ints(1, 6), "n_calib_tokens": optional(ints(1))},
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.head_dim % 2:
        refuse("head_dim", config.head_dim, "even", "Polar coordinates pair the numbers of a head: use another method.")
