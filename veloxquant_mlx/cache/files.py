"""Prompt caches on disk: one safetensors file with a format version, a checksum and what model it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as mlx_cache

from ..artifacts.sealed import Kind, raw_bytes
from ..attention import forward
from ..codecs import entropy
from ..codecs.base import Symbols
from ..coordinators import sinks
from ..core.exceptions import CacheStateError
from ..models.inspect import Slot, cache_slots, language_models
from ..models.rope import Rotation
from . import joint, rest
from .layer import CompressedKVCache

AGAIN = "Make the cache again from the prompt."
FILE = Kind("veloxquant_mlx", 1, "veloxquant_mlx.save_cache", CacheStateError, AGAIN)
_NAMES = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str"}


def save_cache(path: str | Path, caches: Sequence[Any], model: Any = None) -> None:
    """Write the caches of one sequence, compressed as they are held, to ``path``; an older file is replaced at the end.

    ``caches`` is the list that ``for_model`` gave, mlx_lm's own caches in it included. Codes whose codec says so are
    entropy coded, and come back bit for bit (``cache_report(caches, at_rest=True)`` says how many bytes that makes).
    With the ``model``, its weights' fingerprint is written too, so that ``load_cache`` can tell two models of the same
    shape apart. Raises CacheStateError for batches and for caches that a file cannot hold; then nothing is written.
    """
    arrays: dict[str, mx.array] = {}
    layers = []
    for i, cache in enumerate(caches):
        name = type(cache).__name__
        if getattr(mlx_cache, name, None) is not type(cache):
            raise CacheStateError(
                f"cache {i} is a {name}, which a file cannot hold: it must be a cache that for_model or mlx_lm makes. "
                "Save a batch's sequences one by one: extract(i)."
            )
        if isinstance(cache, CompressedKVCache) and (lost := cache.unsaved()):
            raise CacheStateError(
                f"cache {i} was made with {', '.join(lost)}, which a file cannot hold. Build the caches without it."
            )
        scalars, coded = {}, {}
        kinds = _symbols(cache)
        for key, leaf in tree_flatten(cache.state):
            if not isinstance(leaf, mx.array):
                scalars[key] = [_NAMES[type(leaf)], leaf]
            elif key in kinds:
                arrays[f"{i}.{key}"] = entropy.encode_words(leaf, *kinds[key])
                coded[key] = [kinds[key].bits, leaf.shape, leaf.itemsize]
            else:
                arrays[f"{i}.{key}"] = leaf
        layers.append({"class": name, "scalars": scalars, "coded": coded})
    FILE.write(path, {"layers": layers, "weights": None if model is None else fingerprint(model)}, arrays)


def load_cache(path: str | Path, model: Any) -> list[Any]:
    """The caches that ``save_cache`` wrote to ``path``, for ``model``: generation goes on bit for bit.

    Raises FileNotFoundError where there is no file, and CacheStateError, with nothing loaded, for a file that is
    damaged, truncated, from elsewhere, from a newer version, or made with another model.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no cache file {path}")
    header, arrays = FILE.read(path)
    weights = header["weights"]
    if weights is not None and weights != fingerprint(model):
        raise CacheStateError(f"{path} was made with other weights than this {type(model).__name__}'s. {AGAIN}")
    slots = cache_slots(model)
    if len(slots) != len(header["layers"]):
        raise CacheStateError(f"{path} holds {len(header['layers'])} caches; this model uses {len(slots)}. {AGAIN}")
    caches = []
    for i, (layer, slot) in enumerate(zip(header["layers"], slots, strict=True)):
        leaves: list[tuple[str, Any]] = [
            (name.partition(".")[2], array) for name, array in arrays.items() if name.startswith(f"{i}.")
        ]
        coded = layer.get("coded", {})  # not in files of version 0.1
        leaves = [(k, entropy.decode_words(a, *coded[k]) if k in coded else a) for k, a in leaves]
        leaves += [(key, value) for key, (_, value) in layer["scalars"].items()]
        cache = getattr(mlx_cache, layer["class"]).from_state(tree_unflatten(leaves))
        if isinstance(cache, CompressedKVCache):
            _check_layer(path, i, cache, slot)
        elif type(cache) is not type(slot.native):
            raise CacheStateError(
                f"{path}: cache {i} is a {layer['class']}; this model has a {type(slot.native).__name__} there. {AGAIN}"
            )
        caches.append(cache)
    ours = [cache for cache in caches if isinstance(cache, CompressedKVCache)]
    if any(cache.coordinator is not None for cache in ours):
        forward.install(model, *language_models(model))
        joint.meet(ours)
    known = [cache.layer.emergence for cache in ours if cache.protected]
    if known and isinstance(known[0], sinks.Emergence):
        sinks.watch(model, known[0])
    return caches


def fingerprint(model: Any) -> str:
    """A digest of the names, shapes, dtypes and first numbers of a model's weights."""
    digest = hashlib.sha256()
    weights: Any = tree_flatten(model.parameters())
    for name, weight in sorted(weights):
        digest.update(f"{name} {weight.shape} {weight.dtype}".encode())
        digest.update(raw_bytes(weight.reshape(-1)[:8]))
    return digest.hexdigest()


def _symbols(cache: Any) -> dict[str, Symbols]:
    """Which leaves of the cache's state are entropy coded, and how. The state is a header and then every array."""
    if not isinstance(cache, CompressedKVCache):
        return {}
    kinds = rest.symbols(cache)
    return {str(i): kinds[name] for i, name in enumerate(cache.arrays(), start=1) if name in kinds}


def _check_layer(path: str | Path, i: int, cache: CompressedKVCache, slot: Slot) -> None:
    """The layer that the cache was fed by must be the layer that it is now for."""
    if slot.layer is None:
        raise CacheStateError(
            f"{path}: cache {i} is compressed; this model leaves that layer alone ({slot.reason}). {AGAIN}"
        )
    fed, now = cache.layer, slot.layer
    for name in ("head_dim", "kv_heads"):
        a, b = getattr(fed, name), getattr(now, name)
        if a is not None and b is not None and a != b:
            raise CacheStateError(
                f"{path}: cache {i} was fed by a layer with {name}={a}; this model's has {b}. {AGAIN}"
            )
    if (
        isinstance(fed.rope, Rotation)
        and isinstance(now.rope, Rotation)
        and not np.allclose(fed.rope.rate, now.rope.rate)
    ):
        raise CacheStateError(f"{path}: cache {i} was fed by a layer whose positions turn at another rate. {AGAIN}")
