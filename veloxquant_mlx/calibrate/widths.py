"""Which field holds the bits of a method, and caches whose layers differ in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..cache.base import KVCacheBuilder, KVCacheConfig
from ..cache.registry import method
from ..methods._method import Valid, refuse
from ..models.inspect import cache_slots

# Methods whose bits per number are in fields of their own, which take a single number: all of them are set together.
OWN_FIELDS: Mapping[str, tuple[str, ...]] = {
    "cachegen": ("cachegen_resolved_bits",),
    "gear": ("gear_bits",),
    "kvquant": ("kvquant_bits",),
    "nsnquant": ("nsn_bits",),
    "skvq": ("skvq_bits_key", "skvq_bits_value"),
}
_WITHOUT_EFFECT = ("vecinfer",)  # accepts bit_width_inlier, for the sake of old configurations


def bit_fields(name: str) -> tuple[str, ...]:
    """The fields with the bits of method ``name``; ``QuantizerConfigError`` where no one number says them."""
    if name in OWN_FIELDS:
        return OWN_FIELDS[name]
    if "bit_width_inlier" not in method(name).info.reads or name in _WITHOUT_EFFECT:
        others = ", ".join(OWN_FIELDS)
        refuse("method", name, f"a method that reads bit_width_inlier, or one of {others}", "It has no bits per layer.")
    return ("bit_width_inlier",)


def valid_bits(name: str) -> Valid:
    """The bits that method ``name`` takes."""
    info, field = method(name).info, bit_fields(name)[0]
    if field in info.reads:
        return info.reads[field]
    assert info.options is not None, "a field of its own belongs to the options of a method"
    return next(f.metadata["valid"] for f in dataclasses.fields(info.options) if f.name == field)


def for_layers(model: Any, config: KVCacheConfig, bits: int | Sequence[int]) -> list[Any]:
    """``for_model`` with ``bits[i]`` for the i-th attention layer (sliding ones counted), whatever the method's field.

    With ``bit_width_inlier`` it is ``for_model`` with that list. A number is for all layers. Standalone methods serve.

    >>> caches = for_layers(model, KVCacheConfig(method="gear"), [4, 2, 2, 4])  # doctest: +SKIP
    """
    names = bit_fields(config.method)
    if isinstance(bits, int) or names == ("bit_width_inlier",):
        return _made(model, config, names, bits)
    slots = cache_slots(model)
    readers = [slot.index for slot in slots if slot.attention is not None]
    if len(bits) != len(readers):
        refuse("bits", bits, f"one number for each of {len(readers)} attention layers", "Count sliding layers too.")
    made = {b: _made(model, config, names, b) for b in dict.fromkeys(bits)}
    given = dict(zip(readers, bits, strict=True))
    return [made[given.get(slot.index, bits[0])][slot.index] for slot in slots]


def _made(model: Any, config: KVCacheConfig, names: Sequence[str], bits: int | Sequence[int]) -> list[Any]:
    value = bits if isinstance(bits, int) else list(bits)
    changed = dataclasses.replace(config, **dict.fromkeys(names, value))
    return KVCacheBuilder.for_model(model, changed, serve_standalone=True)
