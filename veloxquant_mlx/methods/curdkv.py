"""CurDKV: leverage scores of keys and values (an approximate CUR decomposition) choose what stays.

Paper: Sengupta, Chaudhary, Chakraborty, "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
NeurIPS 2025, arXiv:2509.15038. ``curdkv_rope_base`` is kept for compatibility and has no effect. Uncertain: whether the
paper normalises scores in local windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import MethodInfo, check_room, floats, ints, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class CurDKVOptions:
    """Options of ``curdkv``."""

    curdkv_budget: int = option(512, "tokens kept per head", ints(1))
    curdkv_n_sink: int = option(4, "first tokens that always stay", ints(0))
    curdkv_rank_cap: int = option(16, "largest rank of the leverage scores", ints(1))
    curdkv_rope_base: float = option(10000.0, "no effect", floats("(0, inf)"))


INFO = MethodInfo(
    name="curdkv",
    title="CurDKV",
    family="eviction",
    paper="Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
    arxiv="2509.15038",
    venue="NeurIPS 2025",
    options=CurDKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "curdkv_budget", "curdkv_n_sink", extra=1)
