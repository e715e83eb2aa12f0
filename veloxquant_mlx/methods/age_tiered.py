"""Fewer bits the older a token is: 8, then 4, then 2, on nested grids.

No paper describes this method; nearest relatives are PM-KVQ (arXiv:2505.18610) and, for the orientation of the groups,
KIVI (arXiv:2402.02750).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import MethodInfo, ints, one_of, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class AgeTieredKVOptions:
    """Options of ``age_tiered``."""

    age_recent_boundary: int = option(128, "tokens in the youngest tier", ints(1))
    age_mid_boundary: int = option(1024, "age at which the oldest tier begins", ints(1))
    age_bits_recent: int = option(8, "bits of the youngest tier", one_of(1, 2, 3, 4, 5, 6, 8, 16))
    age_bits_mid: int = option(4, "bits of the middle tier", one_of(1, 2, 3, 4, 5, 6, 8, 16))
    age_bits_old: int = option(2, "bits of the oldest tier", one_of(1, 2, 3, 4, 5, 6, 8, 16))
    age_group_size: int = option(32, "channels per value group", one_of(32, 64, 128))


INFO = MethodInfo(
    name="age_tiered",
    title="Age tiers",
    family="tiered",
    reads={"n_sink_tokens": ints(0)},
    options=AgeTieredKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.age_mid_boundary < config.age_recent_boundary:
        valid = f"an int >= age_recent_boundary = {config.age_recent_boundary}"
        refuse("age_mid_boundary", config.age_mid_boundary, valid, "Tiers follow each other: raise it.")
