"""xKV: groups of layers share one low-rank basis of tokens, taken from the prompt.

Paper: Chang et al., "xKV: Cross-Layer KV-Cache Compression via Aligned Singular Vector Extraction", arXiv:2503.18893
(ICML 2026). Built after its first version; the second decodes only chosen tokens in full, which is not done here.

The keys (before RoPE) and values of a group of layers stand side by side, one matrix each; its leading right singular
vectors, one per sequence, are the bases, and a token is one row of latents for all layers of the group. That pays for
texts much longer than a row of the group is wide: bases cost 16 r / T bits per number.

[design] Tokens that come after the fit are projected on the same bases; the paper keeps them uncompressed. A block of
them that the bases miss (relative error above 0.5, and above that of every block of the fit) keeps its rows: to know
that, packing a block of decoded tokens waits for the device, once per block. Values get half as many latents again as
keys, after the settings of the paper's repository. Latents are quantised per channel. Without ``xkv_rank`` the rank is
that of the energy, at most half the numbers of a row; a group whose factors would take 90 % of the rows stays as it is.
Rows are fitted once there are 4 for each latent. Until then, and until the prompt ends, all of them wait as floats, as
they do in every layer until the last of its group has run; ``xkv_max_ctx`` bounds the former. Under tensor parallelism
every rank has bases of its own heads.

On SmolLM2 (two layers of 192 numbers, 1,024 tokens of prompt) the latents left out are what costs: KL 0.20 at 3.1 bits
by the default energy, 0.11 at 4.9 bits with ``xkv_rank=128``; latents of 16 or 6 bits in place of 4 change neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from ..codecs.base import ALL
from ..codecs.crosslayer import SharedLatents
from ..core.types import Recipe, Stream
from ._groups import grouped
from ._method import MethodInfo, floats, ints, one_of, option, optional, refuse
from ._prerope import before_rope

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo
    from ..models.inspect import Slot
    from ..models.rope import Rotation

ROWS_PER_LATENT = 4  # fewest tokens that bases are fitted on
MORE_VALUES = 1.5  # latents of values, times those of keys


@dataclass
class XKVOptions:
    """Options of ``xkv``."""

    xkv_group_size: int = option(2, "layers that share latents; 1: each its own", ints(1))
    xkv_rank: int | None = option(
        None, "key latents of a group (values: half as many again); None: by energy", optional(ints(1))
    )
    xkv_energy_threshold: float = option(0.95, "share of the energy (squared singular values) kept", floats("(0, 1]"))
    xkv_latent_bits: int = option(4, "bits of the latents; 16: not quantised", one_of(1, 2, 3, 4, 5, 6, 8, 16))
    xkv_group_quant_size: int = option(32, "tokens per group of a latent", ints(2))
    xkv_max_ctx: int = option(8192, "tokens that wait as floats at most for the end of the prompt", ints(1))


INFO = MethodInfo(
    name="xkv",
    title="xKV",
    family="cross-layer",
    paper="xKV: Cross-Layer KV-Cache Compression via Aligned Singular Vector Extraction",
    arxiv="2503.18893",
    needs="rope",
    options=XKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    block = _codec(config, None, fit_rows=0).block
    if config.xkv_max_ctx < block:
        remedy = "Bases are fitted on a block of tokens at least."
        refuse("xkv_max_ctx", config.xkv_max_ctx, f"an int >= {block}, the tokens of a block", remedy)


def prepare(model: Any, slots: Sequence[Slot], config: FlatConfig) -> Sequence[Slot]:
    """Put neighbouring layers into groups."""
    return grouped(slots, config.xkv_group_size)


def _codec(config: FlatConfig, rank: int | None, **more: Any) -> SharedLatents:
    bits, group, energy = config.xkv_latent_bits, config.xkv_group_quant_size, config.xkv_energy_threshold
    return SharedLatents(bits, group, rank=rank, energy=energy, **more)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """All rows in whole blocks, once the prompt has ended and there are enough of them."""
    rotation, notes = before_rope(layer)
    most = config.xkv_max_ctx

    def stream(dim: int, rank: int | None, rotation: Rotation | None = None) -> Stream:
        codec = _codec(
            config,
            rank,
            turned=rotation is not None,
            fit_rows=ALL,
            members=layer.members,
            member=layer.member,
        )
        half = layer.members * (layer.kv_heads or 1) * dim // 2
        least = max(min(ROWS_PER_LATENT * min(rank or half, half), most), codec.block)
        return Stream(codec, chunk=codec.block, rotation=rotation, fit_rows=least)

    keys = stream(layer.head_dim, config.xkv_rank, rotation)
    values = stream(layer.value_dim, None if config.xkv_rank is None else ceil(MORE_VALUES * config.xkv_rank))
    when = f"the prompt when it ends, or its first {most} tokens"
    return Recipe(
        keys=keys,
        values=values,
        deferred=True,
        notes=(*notes, f"bases fitted on {when}, from {keys.first_rows} (keys) and {values.first_rows} (values) on"),
        together=layer.members,
        most_raw=("xkv_max_ctx", most),
    )
