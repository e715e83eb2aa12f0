"""XQuant: layers in a group share the codes of their first layer and keep scales and offsets of their own.

Paper: Yang et al., "XQuant: Achieving Ultra-Low Bit KV Cache Quantization with Cross-Layer Compression", EMNLP 2025,
arXiv:2510.11236. Not the XQuant of arXiv:2508.10395, which keeps the inputs of layers. The layout is that of KIVI.

Paper mode: ``xquant_residual_bits=0`` (2.0 bits per key number and 2.4 per value at the defaults). The default, a 4-bit
residual in every layer but the first of a group, is a setting for quality: neighbouring layers of real models are often
alike in little, and then borrowed codes alone are noise. It takes more memory than 2-bit KIVI.

Uncertain: that the shifts of the levels (1/6 at one bit, 0.045 at two) are those of the paper's results; they are the
middle of the grids in its code. [design] Both tensors are shared from the first layer on, with one width; the paper
chooses layers and widths per tensor. Under tensor parallelism every rank shares the codes of its own heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..codecs.affine import ChannelAffine, TokenAffine
from ..codecs.shared import RelaxedChannels, RelaxedTokens, SharedCodes
from ..core.types import Recipe, Stream
from ._groups import grouped
from ._method import BITS, MethodInfo, ints, one_of, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo
    from ..models.inspect import Slot


@dataclass
class XQuantOptions:
    """Options of ``xquant``."""

    xquant_group_size: int = option(2, "layers that share codes", ints(2))
    xquant_base_bits: int = option(2, "bits of the shared codes", BITS)
    xquant_residual_bits: int = option(
        4, "bits of each layer's own residual; 0: none (paper)", one_of(0, 1, 2, 3, 4, 5, 6, 8)
    )
    xquant_group_quant_size: int = option(32, "tokens per key group and channels per value group", ints(2))
    xquant_max_ctx: int = option(8192, "tokens that layers may hold as floats for each other unnoted", ints(1))


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


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    block, residual = _keys(config, 2, 0).block, config.residual_length
    if residual % block:
        valid = f"a multiple of {block}: whole groups of tokens whose codes fill whole words"
        refuse(
            "residual_length", residual, valid, f"Use {residual // block * block} or {(residual // block + 1) * block}."
        )


def prepare(model: Any, slots: Sequence[Slot], config: FlatConfig) -> Sequence[Slot]:
    """Put neighbouring layers into groups."""
    return grouped(slots, config.xquant_group_size)


def _keys(config: FlatConfig, members: int, member: int) -> SharedCodes:
    group, more = config.xquant_group_quant_size, config.xquant_residual_bits
    base = RelaxedChannels(config.xquant_base_bits, group)
    return SharedCodes(base, ChannelAffine(more, group) if more else None, members, member)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys wait for a whole residual and are packed per channel; values leave a sliding window eight at a
    time.
    """
    group, more, residual = config.xquant_group_quant_size, config.xquant_residual_bits, config.residual_length
    keys = _keys(config, layer.members, layer.member)
    base = RelaxedTokens(config.xquant_base_bits, group, dim=layer.value_dim)
    own = TokenAffine(more, group, dim=layer.value_dim) if more else None
    most = ("xquant_max_ctx", config.xquant_max_ctx)
    return Recipe(
        keys=Stream(keys, chunk=residual or keys.block),
        values=Stream(SharedCodes(base, own, layer.members, layer.member), window=residual),
        together=layer.members,
        most_raw=most,
        notes=(f"codes shared by {layer.members} layers",) if layer.members > 1 else ("codes shared with no layer",),
    )
