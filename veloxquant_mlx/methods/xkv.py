"""xKV: groups of layers share one low-rank basis of tokens, taken from the prompt.

Paper: Chang et al., "xKV: Cross-Layer KV-Cache Compression via Aligned Singular Vector Extraction", arXiv:2503.18893.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._method import MethodInfo, floats, ints, one_of, option, optional


@dataclass
class XKVOptions:
    """Options of ``xkv``."""

    xkv_group_size: int = option(2, "layers that share a basis; 1: each its own", ints(1))
    xkv_rank: int | None = option(None, "rank; None: by energy", optional(ints(1)))
    xkv_energy_threshold: float = option(0.95, "share of the energy (squared singular values) kept", floats("(0, 1]"))
    xkv_latent_bits: int = option(4, "bits of the latents; 16: not quantised", one_of(1, 2, 3, 4, 5, 6, 8, 16))
    xkv_group_quant_size: int = option(32, "numbers per group of the latents", ints(2))
    xkv_max_ctx: int = option(8192, "tokens that the shared buffers are first made for", ints(1))


INFO = MethodInfo(
    name="xkv",
    title="xKV",
    family="cross-layer",
    paper="xKV: Cross-Layer KV-Cache Compression via Aligned Singular Vector Extraction",
    arxiv="2503.18893",
    needs="rope",
    options=XKVOptions,
)
