"""SVDq: principal components of the keys before RoPE, bits falling from 8 to 0 along them; values stay as they are.

Paper: Hong et al., "SVDq: 1.25-bit and 410x Key Cache Compression for LLM Attention", arXiv:2502.15304 (preprint).
Components per head are our design; the paper's are of all heads together (uncertain).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import MethodInfo, each, floats, ints, one_of, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


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
    if config.svdq_rank is None:
        return
    slices = len(config.svdq_bit_schedule)
    if not slices <= config.svdq_rank <= config.head_dim:
        valid = f"None or an int in {slices}..{config.head_dim}, the length of svdq_bit_schedule to head_dim"
        refuse("svdq_rank", config.svdq_rank, valid, "Use None, or a shorter schedule.")
