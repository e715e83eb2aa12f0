"""GEAR: uniform quantisation, a low-rank fit of its error, and a few exact outliers.

Paper: Kang et al., "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM",
arXiv:2403.05527. Uncertain: the venue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import BITS, FLAG, MethodInfo, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class GEAROptions:
    """Options of ``gear``."""

    gear_bits: int = option(2, "bits per number", BITS)
    gear_rank: int | None = option(None, "rank of the error fit; None: by energy, 0: none", optional(ints(0)))
    gear_energy_threshold: float = option(0.9, "share of the energy (squared singular values) kept", floats("(0, 1]"))
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
