"""QJL: signs of a random projection of the keys, affine values.

Paper: Zandieh, Daliri, Han, "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead",
AAAI 2025, arXiv:2406.03482. Paper setting: jl_dim = 2 D, n_outlier_channels = 8.

Scores are noisy: with as many projections as channels (the default) they correlate with the exact ones by 0.80.

[design] Projections are orthogonal with their own exact constant (``codecs.sketch``). ``residual_length`` is the number
of newest tokens that stay exact; older ones are packed in groups of 32. Without ``n_outlier_channels`` no channel is
apart. Outliers get ``min(jl_dim, D)`` projections; the official code has 256 and 128 on most layers at D = 128.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..codecs.affine import TokenAffine
from ..codecs.base import Codec
from ..codecs.signs import GROUP, SplitSketch
from ..codecs.sketch import SignSketch, projections
from ..core.types import Recipe, Stream
from ._method import BITS, MethodInfo, bits_of, check_outliers, ints, optional, refuse
from ._two_stream import SKETCH

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

INFO = MethodInfo(
    name="qjl",
    title="QJL",
    family="rotation",
    paper="QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead",
    arxiv="2406.03482",
    venue="AAAI 2025",
    standalone=True,
    reads={
        "bit_width_inlier": BITS,
        "jl_dim": optional(ints(1)),
        "n_outlier_channels": optional(ints(0)),
        "residual_length": ints(0),
    },
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_outliers(config)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys: signs and a norm per token. Values: affine, in groups of 32 channels of a token."""
    m, outliers = config.jl_dim or layer.head_dim, config.n_outlier_channels or 0
    if outliers >= layer.head_dim:
        valid = f"an int < {layer.head_dim}, the size of a head"
        refuse("n_outlier_channels", outliers, valid, "The paper uses 8.")
    matrix = projections(layer.head_dim, m, config.seed, SKETCH, config.store)
    keys: Codec = SplitSketch(matrix, outliers, min(m, layer.head_dim)) if outliers else SignSketch(matrix)
    values = TokenAffine(bits_of(config), dim=layer.value_dim)
    window = config.residual_length
    return Recipe(
        keys=Stream(keys, window=window, chunk=GROUP),
        values=Stream(values, window=window, chunk=GROUP),
        from_store=config.store is not None,
    )
