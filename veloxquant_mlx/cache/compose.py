"""Two methods on one cache: the first drops rows, the second packs those that stay. Their savings multiply.

Dropping is as it is without packing: nothing is packed before the prompt has ended and its rows are chosen (a method
that drops after every call packs after every call). Where decoding drops one row per token, a packed row cannot make
room for the next: it is hidden, and hidden rows are cleared away once they are half the budget.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..codecs.base import Codec
from ..core.exceptions import QuantizerConfigError
from ..core.types import Recipe, Stream

if TYPE_CHECKING:
    from .base import KVCacheConfig

# Fields that belong to the cache rather than to a method: the first configuration has the say.
CACHE_FIELDS = ("capacity", "dtype", "observers", "enable_vectorized_attend")
# A fit takes the rows that are there when the prompt ends, but not fewer than this.
FIT_ROWS = 32
UNGUIDED = "{name}: rows that stay after others were dropped count as equal; what queries paid to them is forgotten"
REWRITTEN = (
    "{name}: tokens that were packed together are decoded and packed anew whenever dropped rows are cleared away"
)


def check_pair(evicting: KVCacheConfig, packing: KVCacheConfig) -> None:
    """Raise ``QuantizerConfigError`` where the second configuration sets a field of the cache."""
    default = type(packing)()
    for name in CACHE_FIELDS:
        value = getattr(packing, name)
        if value != getattr(default, name) and value != getattr(evicting, name):
            raise QuantizerConfigError(
                f"{name}={value!r} of the second configuration ({packing.method!r}) cannot be used: it must be the "
                f"default, {getattr(default, name)!r}, because the first one speaks for the cache. Set it there."
            )


def compose(evicting: Recipe, packing: Recipe, names: tuple[str, str]) -> Recipe:
    """The recipe that drops rows by ``evicting`` and packs what stays by ``packing``; ``names`` are the methods'."""
    ev = evicting.eviction
    if ev is None or packing.eviction is not None:
        what = f"{names[0]!r} drops none" if ev is None else f"{names[1]!r} drops tokens itself"
        raise QuantizerConfigError(
            f"methods {list(names)} cannot be combined: the first must drop tokens and the second must pack those that "
            f"stay, but {what}. Give for example [snapkv, kivi]."
        )
    if packing.together > 1:
        raise QuantizerConfigError(
            f"methods {list(names)} cannot be combined: {names[1]!r} packs several layers together and must find the "
            f"same tokens in all of them, but {names[0]!r} keeps other tokens in each. Pack with a method that looks "
            "at one layer, such as 'kivi'."
        )
    sinks = ev.sinks if ev.rotation is not None else 0  # sink keys are moved along in attention: they stay floats

    def stream(rows: Stream, packed: Stream) -> Stream:
        dtype = packed.dtype if rows.dtype is None else rows.dtype
        most = max(packed.sinks, sinks)
        return dataclasses.replace(packed, sinks=most, fit_rows=FIT_ROWS, dtype=dtype, bounded=rows.bounded)

    codecs = [s.codec for s in (packing.keys, packing.values) if s.codec is not None]
    together = any(codec.block > 1 or type(codec).take is not Codec.take for codec in codecs)
    rewritten = (REWRITTEN.format(name=names[1]),) if together and (ev.per_step or ev.bounded) else ()
    guide = packing.guide
    unguided = ev.drops and guide is not None and guide.needs_queries and not guide.survives_drops
    return Recipe(
        keys=stream(evicting.keys, packing.keys),
        values=stream(evicting.values, packing.values),
        eviction=ev,
        deferred=packing.deferred,
        guide=guide,
        protected=packing.protected,
        notes=(*evicting.notes, *packing.notes, *rewritten, *([UNGUIDED.format(name=names[1])] if unguided else [])),
        from_store=evicting.from_store or packing.from_store,
    )
