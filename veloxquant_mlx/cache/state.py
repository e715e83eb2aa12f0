"""A cache as arrays: what mlx_lm evaluates between prompt chunks and what its prompt-cache files hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..coordinators.sinks import Emergence
from ..core.exceptions import CacheStateError
from ..core.types import LayerInfo, Recipe
from ..models.bias import KeyBias
from ..models.rope import Rotation, UnknownRotation
from .base import KVCacheConfig
from .lifecycle import Phase

if TYPE_CHECKING:
    from .layer import CompressedKVCache

FORMAT = 2
_PACKAGE = __name__.partition(".")[0]
# Names of the arrays that wait to be acted on: queries and learned sinks of the last attention, its finite note.
QUERIES, SINKS, FINITE = "pending.queries", "pending.sinks", "pending.finite"
DERIVED = "layer."  # in front of what the layer's weights gave
# Not part of what is stored: where things come from or go to.
_JSON = (type(None), bool, int, float, str, list, tuple)
_TRANSIENT = ("options", "store", "observers")


def pack(cache: CompressedKVCache) -> tuple[mx.array, ...]:
    """``(header, *arrays)``; the header is JSON in a uint8 array, so that arrays are all there is."""
    derived = {DERIVED + name: a for name, a in cache._layer.derived.items() if isinstance(a, mx.array)}
    arrays = cache.arrays() | derived
    pending = cache._watch.pending
    header = {
        "format": FORMAT,
        "configs": [_plain(config) for config in _configs(cache)],
        "unsaved": unsaved(cache),
        "layer": _layer_values(cache._layer),
        "offset": cache.offset,
        "phase": cache._life.phase.name,
        "scale": cache._life.scale,
        "new": cache._life.new,
        "budget": cache._life.budget,
        "notes": cache.notes,
        "unchecked": None if pending is None else pending[0],
        "rows": cache._store.counts(),
        "numbers": cache._store.numbers,
        "kind": [(s.batch, s.heads, s.dim, _dtype_name(s.dtype)) for s in (cache._store.keys, cache._store.values)],
        "names": list(arrays),
    }
    return mx.array(np.frombuffer(json.dumps(header).encode(), np.uint8)), *arrays.values()


def unpack(cache: CompressedKVCache, state: Any) -> None:
    """Make ``cache`` what ``pack`` saw. Raises CacheStateError for anything that ``pack`` did not write."""
    header = _header(state)
    names, arrays = header["names"], list(state[1:])
    if len(arrays) != len(names):
        raise CacheStateError(f"the state holds {len(arrays)} arrays; its header names {len(names)}: it is incomplete")
    if header["unsaved"]:
        raise CacheStateError(
            f"the state was made with {', '.join(header['unsaved'])}, which a state cannot hold. "
            "Feed the prompt again to a cache with the same configuration."
        )
    config, *more = (_config(values) for values in header["configs"])
    # Array objects of our own: buffers are written in place, and the state's arrays belong to whoever holds them.
    held = {name: mx.array(array) for name, array in zip(names, arrays, strict=True)}
    derived = {name: held.pop(name) for name in names if name.startswith(DERIVED)}
    layer = _layer(header["layer"], {name.removeprefix(DERIVED): array for name, array in derived.items()})
    cache._config, cache._packing = config, more[0] if more else None
    cache._build(layer)
    cache._reset()
    cache.offset, life = header["offset"], cache._life
    life.phase, life.scale, life.new = Phase[header["phase"]], header["scale"], header["new"]
    life.budget, cache.notes = header["budget"], tuple(header["notes"])
    life.queries, life.sinks = held.pop(QUERIES, None), held.pop(SINKS, None)
    if FINITE in held:
        cache._watch.pending = (header["unchecked"], held.pop(FINITE))
    store = cache._store
    store.set_arrays(held)
    store.set_counts(header["rows"])
    store.numbers = header.get("numbers", {})  # not in files of version 0.1
    for stream, (batch, heads, dim, dtype) in zip((store.keys, store.values), header["kind"], strict=True):
        stream.batch, stream.heads, stream.dim, stream.dtype = batch, heads, dim, getattr(mx, dtype)


def _header(state: Any) -> dict[str, Any]:
    try:
        header = json.loads(bytes(np.array(state[0])))
        found = header["format"]
    except (IndexError, TypeError, ValueError, KeyError) as error:
        raise CacheStateError("this is not the state of a CompressedKVCache (its header cannot be read)") from error
    if found != FORMAT:
        raise CacheStateError(f"state format {found}; this version reads {FORMAT}. Use the version that wrote it.")
    return header


def _configs(cache: CompressedKVCache) -> list[KVCacheConfig]:
    return [config for config in (cache.config, cache.packing) if config is not None]


def _config(plain: dict[str, Any]) -> KVCacheConfig:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
    if values.get("dtype"):
        values["dtype"] = getattr(mx, values["dtype"])
    config = KVCacheConfig(**values)
    if isinstance(config.bit_width_inlier, tuple):
        config.bit_width_inlier = list(config.bit_width_inlier)
    return config


def unsaved(cache: CompressedKVCache) -> list[str]:
    """Fields whose values JSON cannot hold, and the store where constants came out of one."""
    fields = [field for config in _configs(cache) for field in _set_fields(config)]
    names = [name for name, value in fields if not isinstance(value, (*_JSON, mx.Dtype))]
    return [*names, "store"] if cache._recipe.from_store else names


def _plain(config: Any) -> dict[str, Any]:
    """Fields that were set, as JSON values."""
    plain: dict[str, Any] = {"method": config.method}
    for name, value in _set_fields(config):
        if isinstance(value, mx.Dtype):
            plain[name] = _dtype_name(value)
        elif isinstance(value, _JSON):
            plain[name] = value
    return plain


def _set_fields(config: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _TRANSIENT and value is not field.default:
            yield field.name, value


def _layer_values(layer: LayerInfo) -> dict[str, Any]:
    values = {f.name: getattr(layer, f.name) for f in dataclasses.fields(LayerInfo)}
    if isinstance(layer.rope, Rotation):
        values["rope"] = {"partner": layer.rope.partner.tolist(), "rate": layer.rope.rate.tolist()}
    elif isinstance(layer.rope, UnknownRotation):
        values["rope"] = {"reason": layer.rope.reason}
    if layer.key_bias is not None:
        values["key_bias"] = layer.key_bias.vector.tolist()
    if isinstance(layer.emergence, Emergence):
        values["emergence"] = dataclasses.asdict(layer.emergence)
    values["derived"] = {name: told for name, told in layer.derived.items() if isinstance(told, str)}
    return values


def _layer(values: dict[str, Any], derived: dict[str, mx.array]) -> LayerInfo:
    rope, bias = _rope(values["rope"]), values["key_bias"]
    if bias is not None:
        assert not isinstance(rope, UnknownRotation)
        bias = KeyBias(np.array(bias), rope)
    emergence = values.get("emergence")  # not in files of version 0.1
    if isinstance(emergence, dict):
        emergence = Emergence(emergence["block"], tuple(emergence["channels"]), emergence["threshold"])
    derived = derived | values.get("derived", {})  # not in files of version 0.1
    return LayerInfo(**values | {"rope": rope, "key_bias": bias, "emergence": emergence, "derived": derived})


def _rope(values: dict[str, Any] | None) -> Rotation | UnknownRotation | None:
    if values is None:
        return None
    if "reason" in values:
        return UnknownRotation(values["reason"])
    return Rotation(np.array(values["partner"], np.int32), np.array(values["rate"], np.float64))


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def constants(recipe: Recipe) -> list[mx.array | np.ndarray]:
    """Every array that the recipe keeps alive (rotations, codebooks), once each; a model's own arrays are its own."""
    seen: dict[int, mx.array | np.ndarray] = {}
    visited: set[int] = set()

    def walk(value: Any) -> None:
        if isinstance(value, (mx.array, np.ndarray)):
            seen[id(value)] = value
            return
        if isinstance(value, nn.Module) or id(value) in visited:
            return
        visited.add(id(value))
        for child in _children(value):
            walk(child)

    walk(recipe)
    return list(seen.values())


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif type(value).__module__.startswith(_PACKAGE):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
        yield from (getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name))
