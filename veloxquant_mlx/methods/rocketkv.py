"""RocketKV: one coarse eviction after the prompt, then each query reads only the pages that promise most.

Paper: Behnam et al., "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression", ICML 2025,
arXiv:2502.14051. Paper setting: no sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import MethodInfo, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class RocketKVOptions:
    """Options of ``rocketkv``."""

    rocketkv_compression_ratio: float = option(8.0, "how many times fewer tokens are read", floats("(1, inf)"))
    rocketkv_page_size: int | None = option(None, "tokens per page; None: by the ratio", optional(ints(1)))
    rocketkv_head_topk1: int | None = option(None, "channels that score pages; None: by the ratio", optional(ints(1)))
    rocketkv_obs_window: int = option(32, "last queries of the prompt that score it", ints(1))
    rocketkv_n_sink: int = option(4, "first tokens that always stay", ints(0))


INFO = MethodInfo(
    name="rocketkv",
    title="RocketKV",
    family="eviction",
    paper="RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression",
    arxiv="2502.14051",
    venue="ICML 2025",
    needs="real queries",
    options=RocketKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    topk = config.rocketkv_head_topk1
    if topk is not None and topk > config.head_dim:
        refuse("rocketkv_head_topk1", topk, f"None or an int <= head_dim = {config.head_dim}", "Lower it.")
