"""GEAR: uniform quantisation, a low-rank fit of its error, and a few exact outliers.

Paper: Kang et al., "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM",
arXiv:2403.05527. Every block is fitted on its own: the first prompt as a whole, then 2 * ``gear_group_size`` tokens at
a time with half the rank; the newest tokens wait in floats for a whole block. Ours: the size of those blocks, the rank
where none is given (by energy, at most 4 for the prompt; 2 after it, whatever the energy), at most a quarter of a
block's tokens as rank. An outlier is stored with what the low-rank fit misses too, so that it is exact. Outliers of
values are sought over the heads that one process holds. Uncertain: the venue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.affine import ChannelAffine, TokenAffine
from ..codecs.packing import padded
from ..codecs.residual import Residual
from ..core.types import Recipe, Stream
from ._method import BITS, FLAG, MethodInfo, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..codecs.base import Codec
    from ..core.types import LayerInfo

# Ranks where gear_rank is None, for the prompt (at most) and for later blocks: those of the authors' runs.
PROMPT_RANK, BLOCK_RANK = 4, 2


@dataclass
class GEAROptions:
    """Options of ``gear``."""

    gear_bits: int = option(2, "bits per number", BITS)
    gear_rank: int | None = option(None, "rank of the error fit; None: by energy, 0: none", optional(ints(0)))
    gear_energy_threshold: float = option(
        0.9, "share of the squared error that the fit of a prompt is to hold, without gear_rank", floats("(0, 1]")
    )
    gear_sparse_fraction: float = option(0.01, "share of numbers stored exactly; 0: none", floats("[0, 0.5)"))
    gear_group_size: int = option(32, "tokens per key group and channels per value group", ints(2))
    gear_quantize_values: bool = option(True, "False: values stay in the model's dtype", FLAG)


INFO = MethodInfo(
    name="gear",
    title="GEAR",
    family="group quantization",
    paper="GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM",
    arxiv="2403.05527",
    options=GEAROptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.gear_rank is not None and config.gear_rank > config.head_dim:
        refuse("gear_rank", config.gear_rank, f"None or an int <= head_dim = {config.head_dim}", "Lower it.")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys per channel, values per token, each with a low-rank fit of its error and exact extremes."""
    rank, notes = config.gear_rank, []
    keys = ChannelAffine(config.gear_bits, config.gear_group_size)
    block = padded(2 * config.gear_group_size, keys.block)
    if rank is None:
        ranks, energy = (PROMPT_RANK, BLOCK_RANK), config.gear_energy_threshold
    else:
        ranks, energy = (rank, max(1, rank // 2) if rank else 0), None
        if config.gear_energy_threshold != GEAROptions.gear_energy_threshold:
            notes.append("gear_energy_threshold has no effect beside a gear_rank")
        if ranks[1] > block // 4:
            notes.append(f"blocks of {block} tokens take rank {block // 4} in place of {ranks[1]}: a quarter at most")

    def stream(base: Codec, per_channel: bool) -> Stream:
        def part(rank: int, block: int | None, energy: float | None = None) -> Residual:
            fraction = config.gear_sparse_fraction
            return Residual(base, rank, fraction, per_channel=per_channel, block=block, energy=energy)

        return Stream(part(ranks[1], block), chunk=block, prompt=part(ranks[0], None, energy))

    values = TokenAffine(config.gear_bits, config.gear_group_size, dim=layer.value_dim)
    return Recipe(
        keys=stream(keys, True),
        values=stream(values, False) if config.gear_quantize_values else Stream(),
        notes=tuple(notes),
        deferred=True,
    )
