"""KIVI: keys quantised per channel in groups of tokens, values per token in groups of channels, newest tokens exact.

Paper: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024, arXiv:2402.02750.

[design] ``bit_width_outlier`` gives the key channels with the largest mean magnitude bits of their own (TurboQuant,
arXiv:2504.19874): they are found in the first ``n_calib_tokens`` tokens, and no key is packed before those are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from ..codecs.affine import ChannelAffine, TokenAffine
from ..core.types import Recipe, Stream
from ._method import BITS, TWO_STREAM, MethodInfo, bits_of, check_two_stream, ints, option, refuse
from ._two_stream import split

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class KIVIOptions:
    """Options of ``kivi``."""

    kivi_group_size: int = option(32, "tokens per key group and channels per value group", ints(2))


INFO = MethodInfo(
    name="kivi",
    title="KIVI",
    family="group quantization",
    paper="KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
    arxiv="2402.02750",
    venue="ICML 2024",
    reads={"bit_width_inlier": BITS, "residual_length": ints(0), **TWO_STREAM},
    options=KIVIOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_two_stream(config)
    widths = sorted({bits_of(config), config.bit_width_outlier or bits_of(config)})
    residual, block = config.residual_length, lcm(*(ChannelAffine(b, config.kivi_group_size).block for b in widths))
    if residual % block:
        valid = (
            f"a multiple of {block}: whole groups of kivi_group_size = {config.kivi_group_size} tokens whose "
            f"{'- and '.join(map(str, widths))}-bit codes fill whole words"
        )
        remedy = f"Use {residual // block * block} or {(residual // block + 1) * block}."
        refuse("residual_length", residual, valid, remedy)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys wait for a whole residual and are packed per channel; values leave a sliding window eight at a
    time.
    """
    group, residual = config.kivi_group_size, config.residual_length
    keys, notes = split(config, layer.head_dim, lambda _, bits, outlier: ChannelAffine(bits, group))
    values = TokenAffine(bits_of(config), group, dim=layer.value_dim)
    return Recipe(
        keys=Stream(keys, chunk=residual or keys.block),
        values=Stream(values, window=residual),
        notes=notes,
    )
