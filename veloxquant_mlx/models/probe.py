"""One token through a layer's own attention: how its keys turn with the position, and whether the seam is reached.

Models apply rotary positions in many ways (not at all in some layers, to the last channels only, before or after a
norm). What counts is what arrives in the cache, so that is what is looked at; no list of architectures is kept.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..core.exceptions import QuantizerConfigError
from .bias import KeyBias
from .rope import Rotation, UnknownRotation, probe_rotation

# A constant part of the keys is worth its price in attention from this many times the spread of the rest on.
LARGE = 2.0
_POSITION = 7  # turns most channel pairs visibly
_probes: dict[int, tuple[weakref.ref[Any], Probe]] = {}  # id(attention): modules are dicts, so they cannot be keys


@dataclass(frozen=True)
class Probe:
    """``rope``, ``batches`` and ``key_bias`` as in LayerInfo; ``hooked``: queries reach the cache (None: untested)."""

    rope: Rotation | UnknownRotation | None
    hooked: bool | None
    batches: bool = True
    key_bias: KeyBias | None = None


class _Attended(Exception):
    """The attention module handed its queries to the cache."""


class _ProbeCache:
    """Records the keys and values of one token at ``offset`` and whether the seam is reached."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.shared = False
        self.keys: mx.array | None = None
        self._issued: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self._issued = keys, (keys, values)
        return keys, values

    def attend(self, queries: mx.array, *, scale: float, mask: Any, sinks: Any) -> NoReturn:
        raise _Attended


def probe(attention: Any, width: int | None) -> Probe:
    """Probe an attention module that takes hidden states of ``width``; remembered for as long as the module lives.

    Needs ``attention.hook.install`` to have run. Never raises on account of the model: what cannot be read is said in
    an UnknownRotation.
    """
    if not isinstance(attention, nn.Module):
        return Probe(None, None)  # a stand-in without arithmetic
    known = _probes.get(id(attention))
    if known is not None and known[0]() is attention:
        return known[1]
    result, key = _run(attention, width), id(attention)
    _probes[key] = (weakref.ref(attention, lambda _: _probes.pop(key, None)), result)
    return result


def _run(attention: nn.Module, width: int | None) -> Probe:
    if width is None:
        return Probe(UnknownRotation("the model does not say how wide its hidden states are"), None)
    try:
        start, hooked = _keys_at(attention, width, 0)
        moved, _ = _keys_at(attention, width, _POSITION)
    except Exception as error:  # a model's own code may raise anything; the reason reaches whoever needs the rotation
        return Probe(UnknownRotation(f"its attention raised {type(error).__name__}: {error}"), None)
    batches = hooked is not False or _takes_batch_masks(attention, width, start.shape[1] + 1)
    rope = _rotation(attention, start, moved)
    bias = None if isinstance(rope, UnknownRotation) else _key_bias(attention, width, start, rope)
    return Probe(rope, hooked, batches, bias)


def _key_bias(attention: nn.Module, width: int, start: mx.array, rope: Rotation | None) -> KeyBias | None:
    """The constant part of the keys, if they are a constant and a linear part and the constant is large.

    ``start`` are the keys of the probe token at position 0, where no rotation shows.
    """
    constant, double = (_keys_at(attention, width, 0, size)[0] for size in (0.0, 2.0))
    linear = start - constant
    spread = float(mx.sqrt((linear * linear).mean()))
    if not spread or float(mx.abs(constant).max()) < LARGE * spread:
        return None
    # bfloat16 rounds the sum of a large constant and a small rest
    if not mx.allclose(double - constant, 2 * linear, rtol=0.05, atol=0.02 * float(mx.abs(double).max())):
        return None
    return KeyBias(np.array(constant[0, :, 0]), rope)


def _takes_batch_masks(attention: nn.Module, width: int, batch: int) -> bool:
    """Whether attention code of the model's own lines a mask per sequence ``(B, 1, L, S)`` up with its sequences.

    Gemma 2 lines it up with the heads: wrong in silence where there are as many heads as sequences, an error elsewhere,
    so ``batch`` must differ from the number of heads. Shapes alone are looked at; nothing is computed.
    """
    tokens, cache = mx.zeros((batch, 1, width), _float_dtype(attention)), _ProbeCache(0)
    mask = mx.ones((batch, 1, 1, 1), mx.bool_)
    masks = [name for name in inspect.signature(type(attention).__call__).parameters if "mask" in name]
    try:
        attention(tokens, **_arguments(attention, tokens, cache) | dict.fromkeys(masks, mask))
    except ValueError:
        return False
    return True


def _keys_at(attention: nn.Module, width: int, position: int, size: float = 1.0) -> tuple[mx.array, bool | None]:
    """Keys (1, H, 1, D) in float32 of a fixed random token at ``position``, and whether the seam was reached.

    ``size`` multiplies the token.
    """
    token = mx.array(size * np.random.default_rng(0).standard_normal((1, 1, width)), dtype=_float_dtype(attention))
    keys, _, hooked = _rows(attention, token, position)
    return keys.astype(mx.float32), hooked


def first_rows(attention: nn.Module, hidden: np.ndarray) -> tuple[mx.array, mx.array]:
    """Keys and values ``(N, H, 1, D)``, float32, of hidden states ``(N, width)``, each of a token at position 0.

    Queries are not computed. Raises what the model's own code raises.
    """
    keys, values, _ = _rows(attention, mx.array(hidden[:, None], dtype=_float_dtype(attention)), 0)
    return keys.astype(mx.float32), values.astype(mx.float32)


def _rows(attention: nn.Module, token: mx.array, position: int) -> tuple[mx.array, mx.array, bool | None]:
    """What the layer gives its cache for hidden states ``(B, 1, width)``, and whether the seam is reached."""
    cache = _ProbeCache(position)
    try:
        attention(token, **_arguments(attention, token, cache))
        hooked = False
    except _Attended:
        hooked = True
    except Exception:
        if cache.keys is None:
            raise
        hooked = None  # failed between the cache and attention, for lack of a real mask or scale
    if cache._issued is None:
        raise QuantizerConfigError(f"{type(attention).__name__} never updated its cache")
    return *cache._issued, hooked


def _float_dtype(module: nn.Module) -> mx.Dtype:
    arrays = (a for part in module.modules() for a in part.values() if isinstance(a, mx.array))
    return next((a.dtype for a in arrays if mx.issubdtype(a.dtype, mx.floating)), mx.float32)


def _arguments(attention: nn.Module, token: mx.array, cache: _ProbeCache) -> dict[str, Any]:
    """Fill in every parameter that models ask for; whether the keys come out right is checked afterwards."""
    filled: dict[str, Any] = {}
    for parameter in list(inspect.signature(type(attention).__call__).parameters.values())[2:]:
        if parameter.name == "cache":
            filled["cache"] = cache
        elif parameter.name == "offset":
            filled["offset"] = cache.offset
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            filled[parameter.name] = None if "mask" in parameter.name else mx.array(1.0, token.dtype)
    return filled


def _rotation(attention: nn.Module, start: mx.array, moved: mx.array) -> Rotation | UnknownRotation | None:
    """The rotation that explains how the layer's keys change with the position."""
    if bool(mx.array_equal(start, moved)):
        return None
    seen = f"no rotary module of {type(attention).__name__} explains how its keys change with the position"
    size = start.shape[-1]
    # A module without a size of its own turns all that it is given, such as the last channels of a key.
    turning = size - int(np.argmax(np.any(np.array(start != moved), axis=(0, 1, 2))))
    for module, given in itertools.product(_rotary_modules(attention), dict.fromkeys((size, turning))):
        try:
            first = probe_rotation(module, given).within(size)
        except QuantizerConfigError as error:
            seen = str(error)
            continue
        for rotation in (first, first.at_end()):
            error = np.linalg.norm(np.array(rotation(start, _POSITION) - moved)) / np.linalg.norm(np.array(start))
            if error < 0.02:  # bfloat16 keys agree to 0.4 %, a wrong layout or angle is off by more than 10 %
                return rotation
    return UnknownRotation(seen)


def _rotary_modules(attention: nn.Module) -> list[Any]:
    """Parts of the attention module that are called with ``offset=`` (rope, rotary_emb, pos_emb, …)."""
    codes = (
        (part, getattr(type(part).__call__, "__code__", None))
        for part in attention.children().values()
        if isinstance(part, nn.Module)
    )
    return [part for part, code in codes if code is not None and "offset" in code.co_varnames]
