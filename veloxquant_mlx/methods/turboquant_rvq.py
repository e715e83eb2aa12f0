"""Rotation and two additive scalar codebooks of b bits each: 2 b bits per number, for keys and for values.

No paper describes this method. The rotation is that of TurboQuant (arXiv:2504.19874); the joint fit of the two
codebooks and the quantised values are our design. One codebook of 2 b bits is better at equal size except for b = 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..codecs.codebook import ScalarCodebook
from ..codecs.levels import residual_levels
from ..codecs.transformed import Transformed
from ..core.types import Recipe, Stream
from ..transforms.rotation import rotation
from ._method import MethodInfo, bits_of, ints

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

# Keys and values get rotations of their own.
KEYS, VALUES = 0, 1

INFO = MethodInfo(
    name="turboquant_rvq",
    title="TurboQuant rotation, two-stage codebooks",
    family="rotation",
    reads={"bit_width_inlier": ints(1, 4)},
)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Every token is encoded on its own, as soon as its own attention is done; keys and values alike."""

    def stream(dim: int, tag: int) -> Stream:
        first, second = residual_levels(bits_of(config))
        sums = (first[:, None] + second[None, :]).reshape(-1)  # code = first stage << b | second stage
        codec = ScalarCodebook(dim, sums, 2 * bits_of(config))
        return Stream(Transformed(codec, rotation(dim, config.seed, tag, config.store)))

    return Recipe(
        keys=stream(layer.head_dim, KEYS),
        values=stream(layer.value_dim, VALUES),
        from_store=config.store is not None,
    )
