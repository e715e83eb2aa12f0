"""Keys as they were before their rotary position: what several methods store, where the rotation is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..models.rope import Rotation

if TYPE_CHECKING:
    from ..core.types import LayerInfo


def before_rope(layer: LayerInfo) -> tuple[Rotation | None, tuple[str, ...]]:
    """The rotation to take out of the keys of ``layer``, and notes for the receipt where none is taken out."""
    rope = layer.rope
    if isinstance(rope, Rotation):
        return rope, ()
    if rope is None:
        return None, ("keys are stored as they come: no rotary positions are known for this layer",)
    return None, (f"keys are stored after their rotary positions, not before: {rope.reason}",)
