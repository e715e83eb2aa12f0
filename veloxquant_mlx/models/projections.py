"""What a layer's weights make of a hidden state: its keys before RoPE and its values, where they are linear in it.

Looked at, not read off module names: unit hidden states through the layer's own attention give the columns of its
projections, whatever the modules are called, fused, quantised, sharded or tuned. A norm on the keys shows likewise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .probe import first_rows

ERROR = 0.02  # of bfloat16 sums; a norm is off by far more
T = TypeVar("T")
# id(owner): modules are dicts, so they cannot be keys
_made: dict[int, tuple[weakref.ref[Any], dict[int, tuple[Any, Any]]]] = {}


def remembered(owner: Any, place: int, settings: Any, make: Callable[[], T]) -> T:
    """What ``make`` gave for the latest ``settings`` at ``place`` of ``owner``, kept for as long as that lives.

    So caches that are made one after another share their constants.
    """
    key = id(owner)
    if key not in _made or _made[key][0]() is not owner:
        _made[key] = weakref.ref(owner, lambda _: _made.pop(key, None)), {}
    places = _made[key][1]
    if place not in places or places[place][0] != settings:
        places[place] = settings, make()
    return places[place][1]


@dataclass(frozen=True, eq=False)
class Linear:
    """``rows[:, h, i]`` is what hidden channel ``i`` adds in head ``h``: ``(1, H, width, D)``, float32.

    ``offset`` ``(1, H, 1, D)`` is what a hidden state of zeros gives; None where that is nothing.
    """

    rows: mx.array
    offset: mx.array | None


def projections(attention: Any, width: int | None) -> tuple[Linear | str, Linear | str]:
    """Keys and values as linear maps of hidden states of ``width``, or the reason why they are none."""
    if not isinstance(attention, nn.Module) or width is None:
        told = "the model does not show its projections"
        return told, told
    tried = np.random.default_rng(1).standard_normal((1, width)).astype(np.float32)
    states = np.concatenate([np.eye(width, dtype=np.float32), np.zeros((1, width), np.float32), tried])
    try:
        found = first_rows(attention, states)
        mx.eval(found)
    except Exception as error:  # a model's own code may raise anything; the reason reaches the receipt
        told = f"its attention raised {type(error).__name__}: {error}"
        return told, told
    keys, values = (_linear(rows, tried[0], name) for rows, name in zip(found, ("keys", "values"), strict=True))
    return keys, values


def _linear(out: mx.array, tried: np.ndarray, name: str) -> Linear | str:
    """The linear map behind ``out`` ``(width + 2, H, 1, D)``: of unit states, of zeros, and of ``tried``."""
    rows, zero, other = out[:-2, :, 0], out[-2, :, 0], out[-1, :, 0]
    rows = rows - zero
    error = mx.linalg.norm(mx.tensordot(mx.array(tried), rows, 1) + zero - other)
    if not bool(error <= ERROR * mx.linalg.norm(other - zero)):
        return f"{name} are not linear in the hidden state (a norm)"
    offset = zero[None, :, None] if bool(mx.any(zero != 0)) else None
    return Linear(rows.swapaxes(0, 1)[None], offset)
