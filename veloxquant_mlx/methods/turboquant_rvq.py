"""Rotation and two additive scalar codebooks of b bits each: 2 b bits per number, for keys and for values.

No paper describes this method. The rotation is that of TurboQuant (arXiv:2504.19874); the joint fit of the two
codebooks and the quantised values are our design. One codebook of 2 b bits is better at equal size except for b = 1.
Outlier channels of keys may have a stream of their own, as in ``turboquant_mse``, with bits per stage of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..codecs.base import Codec
from ..codecs.codebook import ScalarCodebook
from ..codecs.levels import kept, residual_levels
from ..codecs.transformed import Transformed
from ..core.types import Recipe, Stream
from ..transforms.rotation import rotation
from ._method import FLAG, TWO_STREAM, MethodInfo, bits_of, check_two_stream, ints, optional
from ._two_stream import KEYS, OUTLIERS, VALUES, split

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

STAGE_BITS = ints(1, 4)  # beyond, the second stage is below the resolution of the float16 norm

INFO = MethodInfo(
    name="turboquant_rvq",
    title="TurboQuant rotation, two-stage codebooks",
    family="rotation",
    reads={
        "bit_width_inlier": STAGE_BITS,
        "enable_fused_query_dot": FLAG,
        **TWO_STREAM,
        "bit_width_outlier": optional(STAGE_BITS),
    },
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_two_stream(config)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Every token is encoded on its own, with up to seven others that came before; keys and values alike."""

    def rotated(dim: int, bits: int, tag: int) -> Codec:
        first, second = kept(np.stack(residual_levels(bits)), "residual", bits, dim, config.store)
        sums = (first[:, None] + second[None, :]).reshape(-1)  # code = first stage << b | second stage
        codec = ScalarCodebook(dim, sums, 2 * bits, fused=config.enable_fused_query_dot and tag != VALUES)
        return Transformed(codec, rotation(dim, config.seed, tag, config.store))

    keys, notes = split(
        config, layer.head_dim, lambda d, bits, outlier: rotated(d, bits, OUTLIERS if outlier else KEYS)
    )
    values = rotated(layer.value_dim, bits_of(config), VALUES)
    return Recipe(Stream(keys), Stream(values), notes=notes, from_store=config.store is not None)
