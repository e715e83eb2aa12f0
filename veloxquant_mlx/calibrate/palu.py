"""Axes of the keys and values of groups of heads, as Palu takes them: the whitened basis of the paper."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..codecs.headgroups import FLOAT, GroupLatents
from ..core.types import LayerInfo
from ..methods.palu import PALUOptions
from ..models.rope import Rotation
from .collect import Sample


def palu_axes(
    sample: Sample, layer: LayerInfo, *, groups: int = PALUOptions.palu_n_head_groups
) -> tuple[dict[str, np.ndarray], list[str]]:
    """``k_axes`` and ``v_axes`` ``(H, D, s D)``, ``k_energy`` and ``v_energy`` ``(G, s D)``; keys before RoPE.

    ``groups`` of ``s`` heads at most. Told: the share of the latents that holds 90 % of the energy.
    """
    arrays: dict[str, np.ndarray] = {}
    told: list[str] = []
    for part, name in (("k", "keys"), ("v", "values")):
        rows = sample.parts[name][None].astype(mx.float32)
        if part == "k" and isinstance(layer.rope, Rotation):
            rows = layer.rope.turn(rows, -mx.array(sample.positions)[None, None])
        if part == "k" and layer.key_bias is not None:
            rows = rows - mx.array(layer.key_bias.vector.astype(np.float32))[None, :, None]
        learned = GroupLatents(groups, (FLOAT, FLOAT)).learn(rows)
        axes, energy = (np.array(learned[n][0]) for n in ("axes", "energy"))
        arrays |= {f"{part}_axes": axes, f"{part}_energy": energy}
        short = (np.cumsum(energy, -1) < 0.9 * energy.sum(-1, keepdims=True)).sum(-1) + 1
        told.append(f"{short.max()} of {energy.shape[1]} latents hold 90 % of the {name}")
        if rows.shape[2] < axes.shape[-1]:
            told.append(f"{rows.shape[2]} tokens are fewer than that")
    return arrays, [f"layer {sample.index}: {', '.join(told)}"]
