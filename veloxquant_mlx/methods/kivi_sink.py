"""KIVI that keeps attention sinks exact, found by the outliers of the hidden state where they emerge.

Paper: Su, Yuan, "KVSink: Understanding and Enhancing the Preservation of Attention Sinks in KV Cache Quantization for
LLMs", arXiv:2508.04257. Uncertain: the paper's rule for the emergence layer and the protected layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._method import MethodInfo, ints
from .kivi import INFO as KIVI
from .kivi import KIVIOptions
from .kivi import check as check_kivi

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig

INFO = MethodInfo(
    name="kivi_sink",
    title="KVSink over KIVI",
    family="group quantization",
    paper="KVSink: Understanding and Enhancing the Preservation of Attention Sinks in KV Cache Quantization for LLMs",
    arxiv="2508.04257",
    options=KIVIOptions,
    reads={**KIVI.reads, "n_sink_tokens": ints(0)},
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_kivi(config)
