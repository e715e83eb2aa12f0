"""CaM: values of dropped tokens are merged into the ones that stay.

Paper: Zhang et al., "CaM: Cache Merging for Memory-efficient LLMs Inference", ICML 2024 (PMLR 235). Paper setting:
cam_merge = "mean".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import FLAG, MethodInfo, check_room, ints, one_of, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class CaMOptions:
    """Options of ``cam``."""

    cam_budget: int = option(512, "tokens kept per head", ints(1))
    cam_n_sink: int = option(4, "first tokens that always stay", ints(0))
    cam_merge: str = option("sim_weighted", "how dropped values are spread", one_of("sim_weighted", "mean", "drop"))
    cam_merge_keys: bool = option(False, "merge keys too", FLAG)
    cam_merge_gate: bool = option(True, "merge at random by attention share, as in the paper", FLAG)


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
