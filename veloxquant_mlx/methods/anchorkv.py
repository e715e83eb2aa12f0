"""AnchorKV: a few anchor tokens exact, the others as scaled residuals to their anchor.

Paper: Khalaf et al., "AnchorKV: Anchor-Residual KV Cache Compression", arXiv:2608.02901 (preprint).

The first prompt is compressed once, when it ends, and held in full until then; all later tokens stay exact. Anchors are
exact in attention: keys as they came, and without their rotary positions where other keys are multiples of them.

[design] Scores are pooled over 7 rows. A residual keeps its rms in float16 and takes the levels of normal numbers, not
its largest number with the table of another range. A row names its anchor in one byte (two beyond 256 anchors) and
scales it by a float16 (paper: 8 bytes). The places of anchors that are not among the newest count in the budget, 2
bytes per side in prompts of up to 65536 tokens; anchors of float32 rows count as if they had 16 bits. The budget bounds
the whole layer, to the byte; where the anchors alone exceed it there are no residuals, and the receipt says from which
length on it holds. Where tokens are dropped as well, positions are held and counted, and a compressed prompt of which
tokens are cleared away in decoding comes back decoded. So it does where a trim ends inside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.anchors import KEYS, VALUES, AnchorResiduals, Plan
from ..core.types import NEVER, Recipe, Stream
from ..policies.anchors import AnchorChoice
from ._method import MethodInfo, floats, ints, option
from ._prerope import before_rope

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class AnchorKVOptions:
    """Options of ``anchorkv``."""

    anchorkv_theta: float = option(0.05, "share of the memory of 16-bit rows that may be used", floats("(0, 1]"))
    anchorkv_window: int = option(32, "newest tokens that stay exact", ints(1))
    anchorkv_rho: float = option(0.7, "share of the older anchors that attention chooses", floats("[0, 1]"))
    anchorkv_anchor_frac: float = option(0.0078125, "share of tokens that are anchors", floats("(0, 1]"))
    anchorkv_residual_bits: int = option(2, "bits per number of a residual", ints(1, 4))
    anchorkv_seed: int = option(42, "seed of the rotation of the residuals", ints(0))


INFO = MethodInfo(
    name="anchorkv",
    title="AnchorKV",
    family="vector quantization",
    paper="AnchorKV: Anchor-Residual KV Cache Compression",
    arxiv="2608.02901",
    needs="real queries, rope",
    options=AnchorKVOptions,
)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """One block of anchors and residuals per side; ``anchorkv_theta`` bounds the bytes of both."""
    rope, notes = before_rope(layer)
    plan = Plan(
        config.anchorkv_theta,
        config.anchorkv_window,
        config.anchorkv_anchor_frac,
        config.anchorkv_residual_bits,
        (layer.head_dim, layer.value_dim),
    )
    keys = AnchorResiduals(plan, KEYS, config.anchorkv_seed, rope)
    values = AnchorResiduals(plan, VALUES, config.anchorkv_seed)
    least = plan.least()
    holds = "for no prompt at these settings" if least is None else f"for prompts of {least} tokens and more"
    return Recipe(
        keys=Stream(keys, prompt=keys, chunk=NEVER),
        values=Stream(values, prompt=values, chunk=NEVER),
        deferred=True,
        guide=AnchorChoice(plan, config.anchorkv_rho, rope),
        notes=(
            *notes,
            f"anchorkv_theta = {config.anchorkv_theta:g} holds {holds}: shorter ones are anchors and factors",
        ),
    )
