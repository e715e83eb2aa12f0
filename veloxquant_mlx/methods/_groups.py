"""Which layers of a model a cross-layer method packs together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models.rope import Rotation

if TYPE_CHECKING:
    from ..core.types import LayerInfo
    from ..models.inspect import Slot


def grouped(slots: Sequence[Slot], size: int, first: int = 0) -> Sequence[Slot]:
    """``slots`` whose compressed layers know their group: runs of ``size`` neighbours from rank ``first`` on.

    Neighbours are so in the order of the compressed layers. Where heads, sizes or rotary positions change, a group
    ends early; so may the last one. Layers before ``first`` stay alone.
    """
    layers = [slot.layer for slot in slots if slot.layer is not None]
    roles: dict[int, dict[str, int]] = {}
    for number, run in enumerate(_runs(layers[first:], size)):
        for member, layer in enumerate(run):
            roles[layer.rank] = {"group": number, "member": member, "members": len(run)}
    return [
        s if s.layer is None or s.layer.rank not in roles else replace(s, layer=replace(s.layer, **roles[s.layer.rank]))
        for s in slots
    ]


def _runs(layers: Sequence[LayerInfo], size: int) -> Iterator[list[LayerInfo]]:
    run: list[LayerInfo] = []
    for layer in layers:
        if run and (len(run) == size or not _alike(run[0], layer)):
            yield run
            run = []
        run.append(layer)
    if run:
        yield run


def _alike(a: LayerInfo, b: LayerInfo) -> bool:
    same = all(getattr(a, name) == getattr(b, name) for name in ("head_dim", "value_dim", "kv_heads"))
    return same and _same_rotation(a.rope, b.rope)


def _same_rotation(a: Any, b: Any) -> bool:
    if isinstance(a, Rotation) and isinstance(b, Rotation):
        return np.array_equal(a.partner, b.partner) and np.array_equal(a.rate, b.rate)
    return a is b is None
