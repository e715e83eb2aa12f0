"""Fewer bits the older a token is: 8, then 4, then 2, on nested grids.

No paper describes this method; nearest relatives are PM-KVQ (arXiv:2505.18610) and, for the orientation of the groups,
KIVI (arXiv:2402.02750). All of it is our design.

Tokens are packed in blocks of 32 once 32 newer ones exist, keys per channel of a block, values per token, at the bits
of the youngest tier. A block whose youngest token has reached the age of the next tier moves on to it: between nested
grids (8, 4, 2 bits; 6 and 3 or 2) by whole numbers alone, otherwise by one more rounding of the decoded rows, always
from the tier before. Boundaries round up to whole blocks. 16 bits mean the model's own dtype. A tier cannot have more
bits than a younger one, since nothing brings them back: it then keeps what is there, and the receipt says so.

The first ``n_sink_tokens`` tokens stay exact. Rows that a trim makes younger stay in their tier, so the rows before it
may have fewer bits than in a cache that never saw more. With a method that drops tokens, age counts the rows that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.nested import NestedKeys, NestedValues, grids
from ..codecs.packing import padded
from ..core.types import Recipe, Stream
from ._method import MethodInfo, ints, one_of, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..codecs.base import Codec
    from ..core.types import LayerInfo

BLOCK = 32  # tokens of a block, and of a key group
EXACT = 16  # "bits" of rows that are not packed


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


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """One codec per tier that packs; blocks of keys and of values grow old together."""
    named = (
        ("age_bits_recent", BLOCK),
        ("age_bits_mid", padded(config.age_recent_boundary, BLOCK)),
        ("age_bits_old", padded(config.age_mid_boundary, BLOCK)),
    )
    tiers: list[tuple[int, int]] = []  # ages and bits
    notes: list[str] = []
    fewest = EXACT
    for name, age in named:
        asked = getattr(config, name)
        if asked > fewest:
            notes.append(f"{name}={asked} has no effect: a younger tier leaves {fewest} bits, and no more come back")
        if asked < fewest:
            tiers.append((age, asked))
            fewest = asked
    if not tiers:
        return Recipe(keys=Stream(), values=Stream(), notes=(*notes, "16 bits in all tiers: nothing is packed"))
    ages, bits = zip(*tiers, strict=True)
    widths = list(zip(bits, grids(bits), strict=True))
    keys = [NestedKeys(b, BLOCK, grid) for b, grid in widths]
    values = [NestedValues(b, config.age_group_size, grid, dim=layer.value_dim) for b, grid in widths]

    def stream(codecs: Sequence[Codec]) -> Stream:
        older = tuple(zip(ages[1:], codecs[1:], strict=True))
        return Stream(codecs[0], window=ages[0], chunk=BLOCK, sinks=config.n_sink_tokens, older=older)

    return Recipe(keys=stream(keys), values=stream(values), notes=tuple(notes))
