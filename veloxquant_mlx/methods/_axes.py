"""Principal axes from a calibration artifact, for the methods that code keys and values on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..artifacts.calibration import calibrated
from ..codecs.allocation import MOST_BITS
from ..codecs.base import Codes

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

ROWS_PER_AXIS = 4  # fewest tokens of a prompt, per channel, that axes are taken from
PARTS = ("k", "v")


def name_of(part: str, name: str, owner: str = "") -> str:
    """The name in an artifact of array ``name`` of keys (``k``) or values (``v``), with whose it is in front."""
    return f"{owner}{'.' if owner else ''}{part}_{name}"


def stored_axes(
    config: FlatConfig, layer: LayerInfo, owner: str = "", centred: bool = False
) -> Mapping[str, Codes] | None:
    """What ``PrincipalLevels.learn`` gave for keys and for values when the artifact was made; None without one."""
    shapes: dict[str, tuple[int | None, ...]] = {}
    for part, dim in zip(PARTS, (layer.head_dim, layer.value_dim), strict=True):
        heads = layer.kv_heads
        own = {"basis": (heads, dim, dim), "spread": (heads, dim), "errors": (dim, MOST_BITS + 1)}
        own |= {"mean": (heads, 1, dim)} if centred else {}
        shapes |= {name_of(part, name, owner): shape for name, shape in own.items()}
    found = calibrated(config, layer, **shapes)
    if found is None:
        return None
    names = ("basis", "spread", "errors", *(("mean",) if centred else ()))
    arrays = {part: {name: found[name_of(part, name, owner)] for name in names} for part in PARTS}
    return {part: {n: a if n == "errors" else a[None] for n, a in own.items()} for part, own in arrays.items()}


def origin(config: FlatConfig, layer: LayerInfo, stored: bool, otherwise: str, needed: int | None = None) -> str:
    """Where the axes come from, for the receipt; ``otherwise``: what is done on fewer than ``needed`` tokens."""
    if stored:
        return "axes from the calibration artifact"
    calib, least = config.n_calib_tokens, ROWS_PER_AXIS * max(layer.head_dim, layer.value_dim)
    when = f"the prompt when it ends, once it has {least} tokens, which are exact until then"
    when = f"the first {calib} tokens" if calib else when
    return f"no calibrated axes in store: fitted on {when}; on fewer than {needed or least}, {otherwise}"
