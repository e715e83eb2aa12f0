"""SnapKV: at the end of the prompt keep what the last queries attend to, per key/value head, and the window itself.

Paper: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS 2024, arXiv:2404.14469.
Protected sinks are our addition (paper: snap_n_sink = 0), as is choosing again after later turns of a chat.

The first call of a single token after a longer one ends the prompt, as mlx_lm feeds the last token by itself. Where a
prefill step happens to hold one token, the choice is made one token early; with steps of one token nothing is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from ..core.types import Recipe, Stream
from ..policies.eviction import Eviction
from ..policies.scores import WindowAttention
from ._method import BACKEND, FLAG, MethodInfo, check_backend, check_capacity, check_room, ints, one_of, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class SnapKVOptions:
    """Options of ``snapkv``."""

    snap_dtype: str = option("auto", "dtype of the stored rows; auto: the model's", one_of("auto", "float16"))
    snap_batched_scoring: bool = option(True, "False: score one head at a time, with less scratch memory", FLAG)
    snap_backend: str = option("auto", "how scores are computed; every choice selects the same tokens", BACKEND)
    snap_budget: int = option(512, "tokens kept per head, window and sinks included", ints(1))
    snap_obs_window: int = option(32, "last queries of the prompt that score it; their tokens stay", ints(1))
    snap_n_sink: int = option(4, "first tokens that always stay", ints(0))


# No field exists for these two; the values of the paper's reference code.
KERNEL_SIZE = 5
POOLING = "mean"

INFO = MethodInfo(
    name="snapkv",
    title="SnapKV",
    family="eviction",
    paper="SnapKV: LLM Knows What You are Looking for Before Generation",
    arxiv="2404.14469",
    venue="NeurIPS 2024",
    needs="real queries",
    options=SnapKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "snap_budget", "snap_n_sink", "snap_obs_window")
    check_capacity(config, "snap_budget")
    check_backend(config, "snap_backend")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Everything is kept until the prompt ends; decoded tokens are only added."""
    score = WindowAttention(
        config.snap_obs_window, KERNEL_SIZE, POOLING, config.snap_batched_scoring, config.snap_backend == "reference"
    )
    rows = Stream(dtype=mx.float16 if config.snap_dtype == "float16" else None)
    return Recipe(keys=rows, values=rows, eviction=Eviction(config.snap_budget, sinks=config.snap_n_sink, score=score))
