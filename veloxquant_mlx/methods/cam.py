"""CaM: values of dropped tokens are merged into the ones that stay.

Paper: Zhang et al., "CaM: Cache Merging for Memory-efficient LLMs Inference", ICML 2024 (PMLR 235). Paper setting:
cam_merge = "mean". As in the authors' code sinks and the newest tokens stay, and nothing is merged at the end of the
prompt. Uncertain: their scripts differ in the gate's denominator and in the width of the merge; the formula is the
paper's, the width of 32 that of one script. Merging by similarity and merging keys are extensions. Positions stay the
original ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.types import Recipe, Stream
from ..models.rope import Rotation, UnknownRotation
from ..policies.eviction import Eviction
from ..policies.gumbel import stream
from ..policies.merging import NewestWithSums, Spread
from ._method import FLAG, MethodInfo, check_capacity, check_room, ints, one_of, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class CaMOptions:
    """Options of ``cam``."""

    cam_budget: int = option(512, "tokens kept per head", ints(1))
    cam_n_sink: int = option(4, "first tokens that always stay", ints(0))
    cam_merge: str = option("sim_weighted", "how dropped values are spread", one_of("sim_weighted", "mean", "drop"))
    cam_merge_keys: bool = option(False, "merge keys too", FLAG)
    cam_merge_gate: bool = option(True, "merge at random by attention share, as in the paper", FLAG)


NO_ROPE = "no rotary module at this layer or at hand: keys are merged as they are"

INFO = MethodInfo(
    name="cam",
    title="CaM",
    family="merging",
    paper="CaM: Cache Merging for Memory-efficient LLMs Inference",
    venue="ICML 2024",
    needs="real queries",
    options=CaMOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "cam_budget", "cam_n_sink", extra=1)
    check_capacity(config, "cam_budget")
    if config.cam_merge == "drop" and config.cam_merge_keys:
        refuse("cam_merge_keys", True, "False while cam_merge='drop'", "Choose cam_merge='mean' or 'sim_weighted'.")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """One cut at the end of the prompt, then the oldest row behind the sinks is merged and dropped for every new one.

    Summed attention is only needed, and only kept, for the gate.
    """
    rope, sinks, how = layer.rope, config.cam_n_sink, config.cam_merge
    if config.cam_merge_keys and isinstance(rope, UnknownRotation):
        remedy = "Merge values alone."
        refuse("cam_merge_keys", True, f"False for this layer, whose keys cannot be moved: {rope.reason}", remedy)
    rotation = rope if config.cam_merge_keys and isinstance(rope, Rotation) else None
    merge, score = None, None
    if how != "drop":
        words = stream(config.seed, layer.index)
        merge = Spread(words, sinks, how == "sim_weighted", config.cam_merge_gate, config.cam_merge_keys, rotation)
        score = NewestWithSums() if config.cam_merge_gate else None
    policy = Eviction(config.cam_budget, sinks, config.cam_budget - sinks, score, per_step=True, merge=merge)
    notes = (NO_ROPE,) if config.cam_merge_keys and rotation is None else ()
    return Recipe(keys=Stream(), values=Stream(), eviction=policy, notes=notes)
