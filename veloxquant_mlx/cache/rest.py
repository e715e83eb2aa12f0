"""What a cache takes at rest: packed codes are entropy coded there, where their codec says that this can pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs import entropy
from ..codecs.base import Symbols

if TYPE_CHECKING:
    from .layer import CompressedKVCache


@dataclass(frozen=True)
class AtRest:
    """Bytes of a cache as ``save_cache`` writes it.

    ``nbytes``: every array, coded ones as they are coded. ``coded``: the entropy-coded ones alone, really encoded,
    tables included. ``entropy``: the empirical entropy of the same codes, a bound without tables that is not reached.
    """

    nbytes: int
    coded: int
    entropy: int

    def __add__(self, other: AtRest) -> AtRest:
        return AtRest(self.nbytes + other.nbytes, self.coded + other.coded, self.entropy + other.entropy)


def symbols(cache: CompressedKVCache) -> dict[str, Symbols]:
    """The names of the cache's arrays that a file holds entropy coded."""
    out = {}
    for owner, stream in (("k", cache._recipe.keys), ("v", cache._recipe.values)):
        for prefix, codec in (("", stream.codec), ("prompt.", stream.prompt)):
            out |= {f"{owner}.{prefix}{name}": s for name, s in (codec.symbols if codec else {}).items()}
    return out


def at_rest(cache: CompressedKVCache) -> AtRest:
    """Codes everything to know its size: takes as long as saving does."""
    kinds, nbytes, coded, bits = symbols(cache), 0, 0, 0.0
    for name, array in cache.arrays().items():
        kind = kinds.get(name)
        if kind is None:
            nbytes += array.nbytes
        else:
            codes = entropy.channel_codes(array, kind.bits)
            coded += len(entropy.encode_bytes(codes, kind.per_channel))
            bits += entropy.empirical_bits(codes, kind.per_channel)
    return AtRest(nbytes + coded, coded, round(bits / 8))
