"""TurboQuant, inner-product variant: b - 1 bits of rotated scalar codebook and a one-bit sketch of what they miss.

Paper: Zandieh, Daliri, Hadian, Mirrokni, "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
ICLR 2026, arXiv:2504.19874. No official code.

Scores are unbiased over the choice of the random matrices, where ``turboquant_mse`` shrinks them all by one factor.
Softmax tolerates a common factor better than noise: at equal bits the MSE variant is often closer to the model.

[design] Values are those of ``turboquant_mse``: the paper does not speak of them, and sums gain nothing from unbiased
terms. Projections are orthogonal, with their own exact constant (``codecs.sketch``). At one bit there is only the
sketch. ``jl_dim`` counts the projections of a whole key; with outlier channels apart each stream gets its share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..codecs.base import Codec
from ..codecs.sketch import SignSketch, Sketched, projections
from ..codecs.transformed import Transformed
from ..core.types import Recipe, Stream
from ..transforms.rotation import rotation
from ._method import BITS, FLAG, TWO_STREAM, MethodInfo, bits_of, check_two_stream, ints, optional
from ._two_stream import KEYS, OUTLIER_SKETCH, OUTLIERS, SKETCH, VALUES, split
from .turboquant_mse import codebook

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

INFO = MethodInfo(
    name="turboquant_prod",
    title="TurboQuant (inner product)",
    family="rotation",
    paper="TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
    arxiv="2504.19874",
    venue="ICLR 2026",
    standalone=True,
    reads={
        "bit_width_inlier": BITS,
        "jl_dim": optional(ints(1)),
        "enable_fused_query_dot": FLAG,
        **TWO_STREAM,
    },
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_two_stream(config)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Every token is encoded on its own, with up to seven others that came before."""

    def key_codec(dim: int, bits: int, outlier: bool) -> Codec:
        turn, project = (OUTLIERS, OUTLIER_SKETCH) if outlier else (KEYS, SKETCH)
        m = max(round((config.jl_dim or layer.head_dim) * dim / layer.head_dim), 1)
        sketch = SignSketch(projections(dim, m, config.seed, project, config.store))
        if bits == 1:
            return sketch
        # Projections of rotated rows are as random as projections of rows.
        coded = Sketched(codebook(config, dim, bits - 1, config.enable_fused_query_dot), sketch)
        return Transformed(coded, rotation(dim, config.seed, turn, config.store))

    keys, notes = split(config, layer.head_dim, key_codec)
    turn = rotation(layer.value_dim, config.seed, VALUES, config.store)
    values = Transformed(codebook(config, layer.value_dim, bits_of(config)), turn)
    return Recipe(Stream(keys), Stream(values), notes=notes, from_store=config.store is not None)
