"""KVzip: keep the pairs that the model needs to reconstruct its own context, whatever is asked later.

Paper: Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", NeurIPS 2025,
arXiv:2505.23416.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import MethodInfo, check_room, ints, one_of, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class KVzipOptions:
    """Options of ``kvzip``."""

    kvzip_budget: int = option(512, "mean pairs kept per layer and head", ints(1))
    kvzip_n_sink: int = option(4, "first tokens that always stay", ints(0))
    kvzip_probe: str = option(
        "context", "queries that score: a reconstruction pass or the latest ones", one_of("context", "latest")
    )


INFO = MethodInfo(
    name="kvzip",
    title="KVzip",
    family="eviction",
    paper="KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
    arxiv="2505.23416",
    venue="NeurIPS 2025",
    needs="real queries",
    options=KVzipOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "kvzip_budget", "kvzip_n_sink")
