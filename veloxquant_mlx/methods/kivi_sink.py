"""KIVI that keeps attention sinks exact, found by the outliers of the hidden state where they emerge.

Paper: Su, Yuan, "KVSink: Understanding and Enhancing the Preservation of Attention Sinks in KV Cache Quantization for
LLMs", arXiv:2508.04257. Uncertain: the paper's rule for the emergence layer and the protected layers.

A short probe text tells, once per model, after which layer a few tokens have massive activations, and in which
channels. When the model runs, a token is a sink where it exceeds the probe's threshold there [design: the paper takes
the largest]; the first ``n_sink_tokens`` of them stay exact in all later layers, wherever they stand, so that nothing
depends on how a prompt is cut [design]. Layers up to that one, and models where nothing of the kind is found, keep the
first ``n_sink_tokens`` tokens exact. Caches that no model made ready by ``for_model`` (or ``load_cache``) feeds do the
same. The receipt says which rule was used (``sink_rule``).

Measured on 400 tokens of a story at 2 bits, residual 32, mean KL from the uncompressed cache: SmolLM2-135M (one sink,
the first token, from block 11 of 30 on) 0.124 kivi, 0.051 kivi_sink, 0.035 with the first five tokens in all layers;
Gemma 3 270M (the first token, from block 3 on) 0.0547, 0.0044, 0.0039. Where the first token is the only sink, the four
after it are worth keeping too; sinks elsewhere are what this method is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import kivi
from ._method import MethodInfo, ints
from .kivi import KIVIOptions

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo, Recipe
    from ..models.inspect import Slot

INFO = MethodInfo(
    name="kivi_sink",
    title="KVSink over KIVI",
    family="group quantization",
    paper="KVSink: Understanding and Enhancing the Preservation of Attention Sinks in KV Cache Quantization for LLMs",
    arxiv="2508.04257",
    options=KIVIOptions,
    reads={**kivi.INFO.reads, "n_sink_tokens": ints(0)},
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    kivi.check(config)


def prepare(model: Any, slots: Sequence[Slot], config: FlatConfig) -> Sequence[Slot]:
    """Find out where the sinks of ``model`` emerge."""
    from ..coordinators import sinks  # imports mlx_lm, which takes seconds

    return sinks.prepare(model, slots, config.store) if config.n_sink_tokens else slots


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """KIVI, with rows beside the packed ones for tokens that are found, or its first tokens never packed."""
    plain, n, found = kivi.recipe(config, layer), config.n_sink_tokens, layer.emergence
    if not n:
        return plain
    if found is not None and not isinstance(found, str):
        where = f"beyond {found.threshold:.0f} in hidden channels {list(found.channels)} after block {found.block}"
        rule = f"sink_rule: the first {n} tokens {where}"
        return dataclasses.replace(plain, protected=n, notes=(*plain.notes, rule))
    why = found or "no model is at hand"
    return dataclasses.replace(
        plain,
        keys=dataclasses.replace(plain.keys, sinks=n),
        values=dataclasses.replace(plain.values, sinks=n),
        notes=(*plain.notes, f"sink_rule: the first {n} positions ({why})"),
    )
