"""KVzip: keep the pairs that the model needs to reconstruct its own context, whatever is asked later.

Paper: Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", NeurIPS 2025,
arXiv:2505.23416.

Before the prompt's last token the model is run on "repeat the context" and the prompt itself, with its full caches. A
pair's score is the largest attention that it gets from any query of its kv head; the best pairs of all layers and heads
stay, ``kvzip_budget`` per head on average, once and for all. Shorter heads of a layer are padded to its longest, and
padding is held and counted. The words come from the tokenizer (``veloxquant generate`` and ``serve`` give it, others by
``coordinators.reconstruction.remember_tokenizer``); without one the context is repeated unasked, and the receipt says
so. ``prepare_kvzip`` runs the pass for a context that many questions share.

Ours: sinks and the prompt's last token count as kept; the head of the chat template stays where it is known; with steps
of one token nothing is dropped. ``kvzip_probe="latest"`` is not the paper's method: no pass, scores by the largest
attention of the prompt's last 32 queries (which stay), and heads compete within their layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..coordinators.reconstruction import Reconstruction
from ..core.types import Recipe, Stream
from ..policies.eviction import Eviction
from ..policies.heads import Compete
from ..policies.reconstruction import Reconstructed
from ..policies.scores import WindowAttention
from ._method import MethodInfo, check_room, ints, one_of, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

WINDOW = 32  # queries of the probe "latest"
LATEST = f"kvzip_probe='latest': scored by the last {WINDOW} queries of the prompt, not by reconstruction"


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
    check_room(config, "kvzip_budget", "kvzip_n_sink", extra=WINDOW if config.kvzip_probe == "latest" else 0)
    if config.capacity is not None:
        valid = "None where heads compete: one head alone may keep more than any cap"
        refuse("capacity", config.capacity, valid, "Leave capacity out, or choose a method with one budget per head.")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Everything is kept until the first prompt ends; later tokens are only added."""
    budget, sinks = config.kvzip_budget, config.kvzip_n_sink
    if config.kvzip_probe == "latest":
        score = WindowAttention(WINDOW, kernel=1, peak=True)
        policy = Eviction(budget, sinks, score=score, select=Compete(0), ragged=True, once=True)
        return Recipe(keys=Stream(), values=Stream(), eviction=policy, notes=(LATEST,))
    coordinator = Reconstruction(budget, sinks)
    policy = Eviction(budget, sinks, score=Reconstructed(), ragged=True, coordinator=coordinator)
    return Recipe(keys=Stream(), values=Stream(), eviction=policy)
