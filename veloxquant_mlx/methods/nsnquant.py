"""NSNQuant: normalise, shift, normalise, rotate, then one universal vector codebook.

Paper: Son, Choi, Yoo, "NSNQuant: A Double Normalization Approach for Calibration-Free Low-Bit Vector Quantization of KV
Cache", NeurIPS 2025, arXiv:2505.18231.

[design] Keys are coded before their rotary position as a whole, and are turned tile by tile when they are scored; the
paper takes the mean before and codes what is left after, which changes neither the bits nor the error. The codebook is
Euclidean, trained on normal vectors alone. The last whole window and the tokens after it stay exact, so between one and
two windows. Head sizes without a Hadamard transform of their own get a random rotation in its place. Uncertain, since
read in a reproduction only: 4 bits for norms and shifts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from ..codecs.nsn import NSN
from ..codecs.universal import universal_codebook
from ..core.types import Recipe, Stream
from ..transforms.base import Transform
from ..transforms.rotation import RandomHadamard, Rotation, haar, hadamard_is_safe
from ._method import MethodInfo, ints, one_of, option
from ._prerope import before_rope

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class NSNQuantOptions:
    """Options of ``nsnquant``."""

    nsn_bits: int = option(2, "bits per number", one_of(1, 2))
    nsn_residual_length: int = option(64, "tokens per window of normalisation", ints(1))
    nsn_codebook_size: int = option(256, "entries of the codebook", one_of(*(2**n for n in range(1, 17))))
    nsn_subvector_dim: int = option(8, "numbers per code", ints(1))
    nsn_seed: int = option(1234, "seed of the codebook", ints(0))
    nsn_max_ctx: int = option(8192, "tokens that the buffers are first made for", ints(1))


INFO = MethodInfo(
    name="nsnquant",
    title="NSNQuant",
    family="vector quantization",
    paper="NSNQuant: A Double Normalization Approach for Calibration-Free Low-Bit Vector Quantization of KV Cache",
    arxiv="2505.18231",
    venue="NeurIPS 2025",
    options=NSNQuantOptions,
)


def turn(dim: int, seed: int) -> Transform:
    """The Hadamard transform, or a random rotation where MLX has none of that size."""
    if hadamard_is_safe(dim):
        return RandomHadamard(mx.ones(dim))
    return Rotation(mx.array(haar(dim, seed).astype("float32")))


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys and values alike: whole windows are coded once a further window of tokens has come."""
    window, signed = config.nsn_residual_length, config.nsn_bits == 2
    book = universal_codebook(config.nsn_codebook_size, config.nsn_subvector_dim, signed, config.nsn_seed)
    codecs = [NSN(d, window, book, signed, turn(d, config.nsn_seed)) for d in (layer.head_dim, layer.value_dim)]
    rotation, notes = before_rope(layer)
    bits = codecs[0].bits
    if bits != config.nsn_bits:
        notes += (f"codes take {bits:g} bits per number, not nsn_bits={config.nsn_bits}: the codebook's size says so",)
    if config.nsn_max_ctx != NSNQuantOptions.nsn_max_ctx:
        notes += (f"nsn_max_ctx={config.nsn_max_ctx} has no effect: buffers grow with the text",)
    keys, values = (Stream(codec, window=window, chunk=window) for codec in codecs)
    return Recipe(replace(keys, rotation=rotation), values, notes=notes)
