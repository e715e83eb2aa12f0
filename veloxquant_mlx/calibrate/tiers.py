"""Principal axes of the keys and values of a layer, as AMC-adapted tiers use them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..codecs.ranks import RankTiers
from ..core.types import LayerInfo
from .collect import Sample


def amc_axes(sample: Sample, _: LayerInfo | None = None) -> tuple[dict[str, np.ndarray], list[str]]:
    """``k_basis`` and ``v_basis`` ``(H, D, rank)``: axes of the middle tier, not centred, keys after RoPE."""
    arrays: dict[str, np.ndarray] = {}
    told: list[str] = []
    for part, name in (("k", "keys"), ("v", "values")):
        rows = sample.parts[name][None].astype(mx.float32)
        codec = RankTiers((0.0, 0.0), 1, dim=rows.shape[-1], fit_rows=1)
        arrays[f"{part}_basis"] = np.array(codec.fit(rows)["basis"][0])
        if rows.shape[2] < rows.shape[-1]:
            told.append(f"layer {sample.index}: {rows.shape[2]} tokens are fewer than {name} have channels")
    return arrays, told
