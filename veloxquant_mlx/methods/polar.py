"""PolarQuant: recursive polar coordinates of rotated vectors, one codebook per level of angles.

Paper: Han, Kacham, Karbasi, Mirrokni, Zandieh, "PolarQuant: Quantizing KV Caches with Polar Transformation",
arXiv:2502.02617. Not the other PolarQuant (arXiv:2502.00527), which quantises RoPE pairs of keys.

[design] Every token is quantised, generated ones too: the paper's experiments leave those exact. With
``n_calib_tokens`` the codebooks are fitted on the angles of the sequence's first so many tokens (the paper's online
variant), per layer and level, and nothing is packed before those are there. Heads that are no multiple of 16 are cut
into smaller blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..codecs.base import Codec
from ..codecs.polar import BLOCK, Polar
from ..codecs.transformed import Transformed
from ..core.types import Recipe, Stream
from ..transforms.rotation import rotation
from ._method import MethodInfo, bits_of, ints, optional, refuse
from ._two_stream import KEYS, VALUES

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

INFO = MethodInfo(
    name="polar",
    title="PolarQuant",
    family="rotation",
    paper="PolarQuant: Quantizing KV Caches with Polar Transformation",
    arxiv="2502.02617",
    standalone=True,
    reads={"bit_width_inlier": ints(1, 6), "n_calib_tokens": optional(ints(1))},
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    _even("head_dim", config.head_dim)


def _even(name: str, dim: int) -> None:
    if dim % 2:
        refuse(name, dim, "even", "Polar coordinates pair the numbers of a head: use another method.")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Every token is encoded on its own, with up to seven others that came before; keys and values alike."""
    notes: list[str] = []

    def rotated(what: str, dim: int, tag: int) -> Codec:
        _even("head_dim", dim)
        codec = Polar(dim, bits_of(config), config.n_calib_tokens or 0, config.store)
        if codec.size < BLOCK:
            notes.append(f"{what} of {dim} numbers: a radius for every {codec.size} numbers, not for {BLOCK}")
        return Transformed(codec, rotation(dim, config.seed, tag, config.store))

    keys, values = rotated("keys", layer.head_dim, KEYS), rotated("values", layer.value_dim, VALUES)
    return Recipe(Stream(keys), Stream(values), notes=tuple(notes), from_store=config.store is not None)
