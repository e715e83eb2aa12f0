"""Smoothing factors and codebooks of VecInfer for a layer (Yao et al., ACL 2026, arXiv:2510.06175)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..codecs.vectors import divided, normal_codebook, refined, smoothing, spread
from ..core.types import LayerInfo
from ..methods.vecinfer import VecInferOptions as Default
from ..transforms.hadamard import BlockHadamard
from .collect import Sample

SWEEPS, PER_ENTRY = 10, 16  # from the codebook of normal numbers; the paper takes 30 from random rows
WANTED = 4  # sub-vectors per entry, below which to say so


def vecinfer_codebooks(
    sample: Sample,
    _: LayerInfo | None = None,
    *,
    key: tuple[int, int] = (Default.key_codebook_bits, Default.key_sub_dim),
    value: tuple[int, int] = (Default.value_codebook_bits, Default.value_sub_dim),
    seed: int = 42,
) -> tuple[dict[str, np.ndarray], list[str]]:
    """``smooth_factors`` ``(H, D)``, ``value_spread`` ``(H, 1)`` and codebooks ``(K, d)``, and remarks.

    ``key`` and ``value``: bits of a code and numbers per code. The factors take in the spread of their head, so that
    all heads share the codebook.
    """
    keys, values = (sample.parts[name].astype(mx.float32) for name in ("keys", "values"))
    smooth = smoothing(keys)
    y = BlockHadamard(keys.shape[-1]).forward(keys / smooth)
    arrays = {"smooth_factors": (smooth * spread(y))[:, 0], "value_spread": spread(values)[:, 0]}
    out = {name: np.array(a) for name, a in arrays.items()}
    told: list[str] = []
    for side, rows, (bits, sub) in (("key", y, key), ("value", values, value)):
        x = divided(rows, spread(rows)).reshape(-1, sub)
        start = np.array(normal_codebook(bits, sub)[0, 0].astype(mx.float32))
        out[f"{side}_codebook"] = refined(x, start, SWEEPS, PER_ENTRY << bits, seed)
        if x.shape[0] < WANTED << bits:
            few = f"{x.shape[0]} sub-vectors of {side}s for {1 << bits} entries"
            told.append(f"layer {sample.index}: only {few}: give a longer text")
    return out, told
