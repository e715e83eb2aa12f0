"""Principal axes of the keys and values of a layer, for the methods that code rows on them.

The same fit as on a prompt (``codecs.principal``), on tokens of all of the text.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..codecs.allocation import MOST_BITS
from ..codecs.principal import PrincipalLevels, SpectralLevels, TransformLevels
from ..core.types import LayerInfo
from ..methods._axes import ROWS_PER_AXIS, name_of
from ..methods.spectral import SpectralQuantOptions
from ..models.rope import Rotation
from .collect import Sample

Fitted = tuple[dict[str, np.ndarray], list[str]]


def directions(spread: np.ndarray) -> float:
    """Participation ratio of axes of ``spread`` ``(H, D)``, averaged over heads: how many directions rows lie along."""
    energy = np.square(spread.astype(np.float64))
    return float((np.square(energy.sum(-1)) / np.square(energy).sum(-1)).mean())


def _axes(sample: Sample, layer: LayerInfo, kind: type[PrincipalLevels], owner: str, before_rope: bool) -> Fitted:
    arrays: dict[str, np.ndarray] = {}
    told, few = [], []
    for part, name in (("k", "keys"), ("v", "values")):
        rows = sample.parts[name][None].astype(mx.float32)
        if before_rope and part == "k" and isinstance(layer.rope, Rotation):
            rows = layer.rope.turn(rows, -mx.array(sample.positions)[None, None])
        dim = rows.shape[-1]
        codec = kind(dim, lambda errors: errors, tuple(range(1, MOST_BITS + 1)), fit_rows=0)
        learned = codec.learn(rows)
        arrays |= {name_of(part, n, owner): np.array(a if n == "errors" else a[0]) for n, a in learned.items()}
        told.append(f"{name} lie along {directions(np.array(learned['spread'][0])):.1f} of {dim} directions")
        if rows.shape[2] < ROWS_PER_AXIS * dim:
            few = [f"layer {sample.index}: {rows.shape[2]} tokens are few, take {ROWS_PER_AXIS * dim} or more"]
    return arrays, [f"layer {sample.index}: {', '.join(told)}", *few]


def spectral_axes(sample: Sample, layer: LayerInfo) -> Fitted:
    """Axes of the directions of keys (after RoPE) and of values, under the default ``spectral_model_name``."""
    return _axes(sample, layer, SpectralLevels, SpectralQuantOptions.spectral_model_name, before_rope=False)


def kvtc_axes(sample: Sample, layer: LayerInfo) -> Fitted:
    """Axes of centred keys (before RoPE, where it is known) and values, and the errors of every width on them."""
    return _axes(sample, layer, TransformLevels, "", before_rope=True)
