"""RocketKV: one coarse eviction after the prompt, then each query reads only the pages that promise most.

Paper: Behnam et al., "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression", ICML 2025,
arXiv:2502.14051. Paper setting: no sinks. Ours: sinks, a new choice at the end of every later prompt, dense attention
of prompt tokens, and the least number of rows that short prompts are left with, which is also the least that a query
reads. The authors' code leaves room for the tokens to be generated; a cache does not know their number, so these come
on top. Fewer numbers are read; no kernel fuses the choice with attention, so that the chosen rows are copied first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..policies.eviction import Eviction
from ..policies.retrieval import HybridAttention
from ..policies.scores import WindowAttention
from ._method import MethodInfo, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class RocketKVOptions:
    """Options of ``rocketkv``."""

    rocketkv_compression_ratio: float = option(8.0, "how many times fewer tokens are read", floats("(1, inf)"))
    rocketkv_page_size: int | None = option(None, "tokens per page; None: by the ratio", optional(ints(1)))
    rocketkv_head_topk1: int | None = option(None, "channels that score pages; None: by the ratio", optional(ints(1)))
    rocketkv_obs_window: int = option(32, "last queries of the prompt that score it", ints(1))
    rocketkv_n_sink: int = option(4, "first tokens that always stay", ints(0))


# Of the max pooling of stage 1; no field exists for it.
KERNEL_SIZE = 63
# Length of prompt that the shares in the receipt are given for; they hardly depend on it.
LONG = 2**16

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
    if config.capacity is not None:
        remedy = "Raise rocketkv_compression_ratio to keep fewer."
        refuse("capacity", config.capacity, "None: the ratio and the prompt say how many tokens stay", remedy)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """SnapKV with wide max pooling at the end of the prompt; then pages of keys say which rows a query reads."""
    window, sinks = config.rocketkv_obs_window, config.rocketkv_n_sink
    hybrid = HybridAttention(
        config.rocketkv_compression_ratio,
        layer.head_dim,
        window + sinks + 1,
        config.rocketkv_page_size,
        config.rocketkv_head_topk1,
    )
    held, read = hybrid.shares(LONG)
    note = (
        f"of a long prompt {held:.1%} is held, page summaries included; a decoded token reads {read:.1%} of what a "
        "full cache would hold where rows are floats, and everything held where they are packed or a mask is given"
    )
    policy = Eviction(hybrid, sinks, score=WindowAttention(window, KERNEL_SIZE, "max"), retrieval=hybrid)
    return Recipe(keys=Stream(), values=Stream(), eviction=policy, notes=(note,))
