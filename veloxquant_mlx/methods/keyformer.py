"""Keyformer: summed attention with Gumbel noise and a temperature picks the key tokens, newest ones stay.

Paper: Adnan et al., "Keyformer: KV Cache reduction through key tokens selection for Efficient Generative Inference",
MLSys 2024, arXiv:2403.09054. Paper setting: no sinks, recent = 0.3 budget, tau from 1 to 2 over the new tokens.
keyformer_tau = 0 means no noise and no temperature, which is H2O with h2o_decay = 1. Noise is drawn for every (layer,
query head, query position, key position) from keyformer_seed, layers counted in the process that runs them. The
temperature starts again with every prompt. A prompt of L tokens takes about L * L numbers per query head, which is slow
where it is long.
``keyformer_rope_base`` is kept for compatibility and has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..policies.eviction import Eviction
from ..policies.gumbel import NoisyAttention, stream
from ._method import MethodInfo, check_capacity, check_room, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class KeyformerOptions:
    """Options of ``keyformer``."""

    keyformer_budget: int = option(512, "tokens kept per head", ints(1))
    keyformer_n_sink: int = option(4, "first tokens that always stay", ints(0))
    keyformer_recent: int = option(0, "newest tokens that always stay (at least one does)", ints(0))
    keyformer_tau: float | None = option(
        None, "constant temperature; None: from tau_init to tau_end", optional(floats("[0, inf)"))
    )
    keyformer_tau_init: float = option(1.0, "first temperature", floats("[0, inf)"))
    keyformer_tau_end: float = option(1.0, "last temperature", floats("[0, inf)"))
    keyformer_anneal_steps: int = option(0, "steps from the first to the last temperature", ints(0))
    keyformer_rope_base: float = option(10000.0, "no effect", floats("(0, inf)"))
    keyformer_seed: int = option(0, "seed of the noise", ints(0))


INFO = MethodInfo(
    name="keyformer",
    title="Keyformer",
    family="eviction",
    paper="Keyformer: KV Cache reduction through key tokens selection for Efficient Generative Inference",
    arxiv="2403.09054",
    venue="MLSys 2024",
    needs="real queries",
    options=KeyformerOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(
        config, "keyformer_budget", "keyformer_n_sink", "keyformer_recent", extra=int(config.keyformer_recent == 0)
    )
    if config.keyformer_tau_init == 0 != config.keyformer_tau_end:
        valid = "> 0 while keyformer_tau_end is not 0"
        refuse("keyformer_tau_init", config.keyformer_tau_init, valid, "Set both to 0 for no noise, or both above 0.")
    check_capacity(config, "keyformer_budget")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """One cut at the end of the prompt, then one row less for every row more; each kv head keeps its own rows."""
    tau = config.keyformer_tau
    first, last = (config.keyformer_tau_init, config.keyformer_tau_end) if tau is None else (tau, tau)
    score = NoisyAttention(
        words=stream(config.keyformer_seed, layer.index),
        tau_init=first,
        tau_end=last,
        steps=config.keyformer_anneal_steps if first != last else 0,
    )
    recent = max(config.keyformer_recent, 1)
    policy = Eviction(config.keyformer_budget, config.keyformer_n_sink, recent, score, per_step=True)
    return Recipe(keys=Stream(), values=Stream(), eviction=policy)
