"""TurboQuant, mean-squared-error variant: a random rotation makes every coordinate alike, one scalar codebook fits all.

Paper: Zandieh, Daliri, Hadian, Mirrokni, "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
ICLR 2026, arXiv:2504.19874. No official code.

[design] Uncertain: how the paper chooses outlier channels (here by their mean size over the first ``n_calib_tokens``,
as in ``codecs.two_stream``) and how it splits 3.5 bits; values are not split. The rotation is a randomised Hadamard
where MLX has one, which the theorem does not cover: it holds for the Haar rotation (tested), and the average error is
the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..codecs.base import Codec
from ..codecs.codebook import ScalarCodebook
from ..codecs.levels import kept, lloyd_max
from ..codecs.transformed import Transformed
from ..core.types import Recipe, Stream
from ..transforms.rotation import rotation
from ._method import BITS, FLAG, TWO_STREAM, MethodInfo, bits_of, check_two_stream
from ._two_stream import KEYS, OUTLIERS, VALUES, split

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

INFO = MethodInfo(
    name="turboquant_mse",
    title="TurboQuant (MSE)",
    family="rotation",
    paper="TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
    arxiv="2504.19874",
    venue="ICLR 2026",
    standalone=True,
    reads={"bit_width_inlier": BITS, "enable_fused_query_dot": FLAG, **TWO_STREAM},
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_two_stream(config)


def codebook(config: FlatConfig, dim: int, bits: int, fused: bool = False) -> ScalarCodebook:
    """The Lloyd-Max codebook of a coordinate of the sphere in ``dim`` dimensions."""
    levels = kept(lloyd_max(bits, dim), "sphere", bits, dim, config.store)
    return ScalarCodebook(dim, levels, bits, fused=fused)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Every token is encoded on its own, with up to seven others that came before; keys and values alike."""

    def rotated(dim: int, bits: int, tag: int) -> Codec:
        fused = config.enable_fused_query_dot and tag != VALUES
        return Transformed(codebook(config, dim, bits, fused), rotation(dim, config.seed, tag, config.store))

    keys, notes = split(
        config, layer.head_dim, lambda d, bits, outlier: rotated(d, bits, OUTLIERS if outlier else KEYS)
    )
    values = rotated(layer.value_dim, bits_of(config), VALUES)
    return Recipe(Stream(keys), Stream(values), notes=notes, from_store=config.store is not None)
