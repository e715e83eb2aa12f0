"""Kitty: KIVI's layout in pages, the most sensitive channels of each key page boosted from 2 to 4 bits.

Paper: Xia et al., "Kitty: Accurate and Efficient 2-bit KV Cache Quantization with Dynamic Channel-wise Precision
Boost", MLSys 2026, arXiv:2511.18643. ``residual_length`` is the page and the value window [design].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import BITS, MethodInfo, floats, ints, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class KittyOptions:
    """Options of ``kitty``."""

    kitty_hi_fraction: float = option(0.25, "share of key channels that are boosted", floats("[0, 1]"))
    kitty_hi_bit: int = option(4, "bits of boosted channels", BITS)
    kitty_lo_bit: int = option(2, "bits of all other channels", BITS)
    kitty_group_size: int = option(32, "tokens per key group and channels per value group", ints(2))


INFO = MethodInfo(
    name="kitty",
    title="Kitty",
    family="group quantization",
    paper="Kitty: Accurate and Efficient 2-bit KV Cache Quantization with Dynamic Channel-wise Precision Boost",
    arxiv="2511.18643",
    venue="MLSys 2026",
    reads={"residual_length": ints(1)},
    options=KittyOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.kitty_hi_bit - config.kitty_lo_bit not in (0, 1, 2, 3, 4, 5, 6):
        valid = f"an int in {config.kitty_lo_bit}..{config.kitty_lo_bit + 6}, from kitty_lo_bit on"
        refuse("kitty_hi_bit", config.kitty_hi_bit, valid, "The upper plane takes the bits between the two.")
    if config.residual_length % config.kitty_group_size:
        valid = f"a multiple of kitty_group_size = {config.kitty_group_size}"
        refuse("residual_length", config.residual_length, valid, "The page is cut into groups of tokens.")
