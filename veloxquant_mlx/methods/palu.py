"""Palu: low-rank latents of keys and values per group of heads, the latents quantised.

Paper: Chang et al., "Palu: KV-Cache Compression with Low-Rank Projection", ICLR 2025, arXiv:2407.21118.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import BITS, FLAG, MethodInfo, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class PALUOptions:
    """Options of ``palu``."""

    palu_rank: int | None = option(None, "rank per head; None: by energy", optional(ints(1)))
    palu_energy_threshold: float = option(0.9, "share of the energy (squared singular values) kept", floats("(0, 1]"))
    palu_n_head_groups: int = option(4, "groups of heads that share a basis", ints(1))
    palu_hi_bit: int = option(4, "bits of the leading latents", BITS)
    palu_lo_bit: int = option(2, "bits of the other latents", BITS)
    palu_hi_fraction: float = option(0.25, "share of leading latents", floats("[0, 1]"))
    palu_group_size: int = option(32, "numbers per group", ints(2))
    palu_quantize_values: bool = option(True, "False: value latents stay in the model's dtype", FLAG)


INFO = MethodInfo(
    name="palu",
    title="Palu",
    family="low rank",
    paper="Palu: KV-Cache Compression with Low-Rank Projection",
    arxiv="2407.21118",
    venue="ICLR 2025",
    needs="rope",
    reads={"n_calib_tokens": optional(ints(1))},
    options=PALUOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.palu_lo_bit > config.palu_hi_bit:
        refuse("palu_lo_bit", config.palu_lo_bit, f"<= palu_hi_bit = {config.palu_hi_bit}", "Swap the two.")
    if config.palu_rank is not None and config.palu_rank > config.head_dim:
        refuse("palu_rank", config.palu_rank, f"None or an int <= head_dim = {config.head_dim}", "Lower it.")
