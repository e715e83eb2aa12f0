"""SVDq: principal components of the keys before RoPE, bits falling from 8 to 0 along them; values stay as they are.

Paper: Hong et al., "SVDq: 1.25-bit and 410x Key Cache Compression for LLM Attention", arXiv:2502.15304 (preprint).

[design] Components are those of each head; the paper's are of all heads together (uncertain). The energy is that of
squared singular values, and the heads of a layer share the largest rank that one of them needs. The basis is always
the sequence's own: it costs 32 k / T bits per key number, k the components with bits. Of the 410x, 32x are a sparse
choice of tokens, which this method does not make. Values are not compressed, so that they take most of the memory.
Tokens that come after the fit and leave its subspace lose that part; how much is not tracked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.base import ALL
from ..codecs.latent import LatentAffine
from ..core.types import Recipe, Stream
from ._method import MethodInfo, each, floats, ints, one_of, option, optional, refuse
from ._prerope import before_rope

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

ROWS_PER_CHANNEL = 2  # fewest tokens that a basis is fitted on, per channel


@dataclass
class SVDqOptions:
    """Options of ``svdq``."""

    svdq_rank: int | None = option(None, "key components kept; None: by energy", optional(ints(1)))
    svdq_energy_threshold: float = option(0.95, "share of the energy (squared singular values) kept", floats("(0, 1]"))
    svdq_bit_schedule: tuple[int, ...] = option(
        (8, 4, 2, 1, 1, 0, 0, 0),
        "bits of equal slices of the components, leading first",
        each(one_of(0, 1, 2, 3, 4, 5, 6, 8)),
    )
    svdq_group_size: int = option(32, "tokens per group", one_of(32, 64, 128))


INFO = MethodInfo(
    name="svdq",
    title="SVDq",
    family="low rank",
    paper="SVDq: 1.25-bit and 410x Key Cache Compression for LLM Attention",
    arxiv="2502.15304",
    needs="rope",
    reads={"n_calib_tokens": optional(ints(1))},
    options=SVDqOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if not any(config.svdq_bit_schedule):
        remedy = "Zero bits alone would drop all keys."
        refuse("svdq_bit_schedule", config.svdq_bit_schedule, "a schedule with a member above 0", remedy)
    if config.svdq_rank is None:
        return
    slices = len(config.svdq_bit_schedule)
    if not slices <= config.svdq_rank <= config.head_dim:
        valid = f"None or an int in {slices}..{config.head_dim}, the length of svdq_bit_schedule to head_dim"
        refuse("svdq_rank", config.svdq_rank, valid, "Use None, or a shorter schedule.")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys after the fit in whole groups, once a group of newer ones is there; values as they come."""
    calib, group, least = config.n_calib_tokens, config.svdq_group_size, ROWS_PER_CHANNEL * layer.head_dim
    codec = LatentAffine(
        config.svdq_bit_schedule,
        group,
        rank=None if config.svdq_rank is None else min(config.svdq_rank, layer.head_dim),
        energy=config.svdq_energy_threshold,
        fit_rows=calib or ALL,
    )
    rotation, notes = before_rope(layer)
    when = f"the first {calib} tokens" if calib else f"the prompt when it ends, once there are {least} tokens"
    return Recipe(
        keys=Stream(codec, window=group, chunk=group, rotation=rotation, fit_rows=calib or least),
        values=Stream(),
        deferred=calib is None,
        notes=(*notes, f"components fitted on {when}", "values are not compressed"),
    )
