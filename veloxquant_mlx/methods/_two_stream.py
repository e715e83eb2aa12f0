"""Keys with outlier channels apart, where the configuration asks for it (TurboQuant, arXiv:2504.19874)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..codecs.base import Codec
from ..codecs.two_stream import TwoStream
from ._method import bits_of, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig

SHARE = 4  # the paper's setting: 32 channels of 128
CALIB_TOKENS = 128

# Independent uses of one seed: rotations of keys, values and outlier channels, projections of keys and outliers.
KEYS, VALUES, OUTLIERS, SKETCH, OUTLIER_SKETCH = range(5)

# A codec for keys of so many channels and bits; True: it is for outlier channels.
Make = Callable[[int, int, bool], Codec]


def is_split(config: FlatConfig) -> bool:
    """Whether outlier channels get a stream of their own: ``bit_width_outlier`` alone switches it on."""
    return config.bit_width_outlier is not None or config.enable_outlier_two_stream


def split(config: FlatConfig, dim: int, make: Make) -> tuple[Codec, tuple[str, ...]]:
    """The codec of keys of ``dim`` channels, in one stream or two, and the notes for the receipt."""
    bits = bits_of(config)
    if not is_split(config):
        return make(dim, bits, False), ()
    n, tokens = config.n_outlier_channels or max(dim // SHARE, 1), config.n_calib_tokens or CALIB_TOKENS
    if n >= dim:
        refuse("n_outlier_channels", n, f"an int < {dim}, the size of a head", "Use a quarter of the head or fewer.")
    more = bits if config.bit_width_outlier is None else config.bit_width_outlier
    codec = TwoStream(make(dim - n, bits, False), make(n, more, True), dim, n, tokens)
    return codec, (f"{n} outlier channels of every key head at {more} bits, found in the first {tokens} tokens",)
