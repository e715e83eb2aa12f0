"""Kitty: KIVI's layout in pages, the most sensitive channels of each key page boosted from 2 to 4 bits.

Paper: Xia et al., "Kitty: Accurate and Efficient 2-bit KV Cache Quantization with Dynamic Channel-wise Precision
Boost", MLSys 2026, arXiv:2511.18643. The strength of a channel is the mean ``|k|`` over the page, as in the authors'
code. Ours: ``residual_length`` is the page and the value window, a page holds several groups of tokens (paper: one),
the first 32 tokens are always exact. Uncertain: the share of boosted channels behind each table of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.affine import TokenAffine
from ..codecs.pages import PagedAffine, page_multiple
from ..core.types import Recipe, Stream
from ._method import BITS, MethodInfo, floats, ints, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

# First tokens that stay exact (the paper's setting).
SINKS = 32


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
    low, high, group, page = config.kitty_lo_bit, config.kitty_hi_bit, config.kitty_group_size, config.residual_length
    multiple = page_multiple(low, high, group)
    if page % multiple:
        valid = (
            f"a multiple of {multiple}: whole groups of kitty_group_size = {group} tokens whose codes fill whole words"
        )
        remedy = f"Use {(page // multiple + 1) * multiple}."
        refuse("residual_length", page, valid, remedy)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys are packed in whole pages after the sinks; values leave a window of one page one by one."""
    low, group, page = config.kitty_lo_bit, config.kitty_group_size, config.residual_length
    keys = PagedAffine(low, config.kitty_hi_bit, config.kitty_hi_fraction, group, page, dim=layer.head_dim)
    values = TokenAffine(low, group, dim=layer.value_dim)
    return Recipe(
        keys=Stream(keys, chunk=page, sinks=SINKS),
        values=Stream(values, window=page, sinks=SINKS),
    )
