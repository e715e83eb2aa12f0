"""KVTC: principal components of keys (before RoPE) and values, bits by dynamic programming, entropy coding when saved.

Paper: Staniszewski, Lancucki, "KV Cache Transform Coding for Compact Storage in LLM Inference", ICLR 2026,
arXiv:2511.01815.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import MethodInfo, each, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class KVTCOptions:
    """Options of ``kvtc``."""

    kvtc_bit_budget: int = option(512, "bits per token and head", ints(1))
    kvtc_bit_choices: tuple = option((0, 1, 2, 3, 4, 6, 8), "bits that a component may get", each(ints(0, 8)))
    kvtc_beta: float = option(3.5, "error ratio per bit where nothing was measured", floats("(1, inf)"))


INFO = MethodInfo(
    name="kvtc",
    title="KVTC",
    family="entropy coding",
    paper="KV Cache Transform Coding for Compact Storage in LLM Inference",
    arxiv="2511.01815",
    venue="ICLR 2026",
    needs="rope",
    reads={"n_calib_tokens": optional(ints(1))},
    options=KVTCOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    choices = config.kvtc_bit_choices
    if list(choices) != sorted(set(choices)):
        refuse("kvtc_bit_choices", choices, "ascending, without repeats", f"Use {tuple(sorted(set(choices)))}.")
    if max(choices) == 0:
        refuse("kvtc_bit_choices", choices, "with a member above 0", "Zero bits alone would drop everything.")
    if config.head_dim * choices[0] > config.kvtc_bit_budget:
        valid = f"an int >= {config.head_dim * choices[0]}, head_dim times the smallest of kvtc_bit_choices"
        refuse("kvtc_bit_budget", config.kvtc_bit_budget, valid, "Raise it or allow fewer bits.")
