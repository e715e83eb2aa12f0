"""Query statistics and codebooks of A2ATS for a layer (He et al., arXiv:2502.12665): the fit of a prompt, on a text."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..core.types import LayerInfo
from ..methods.a2ats import A2ATSOptions as Default
from ..models.rope import Rotation
from ..policies.index import factored, fit_books, lower, moments
from .collect import Sample

WANTED = 39  # keys per entry of a codebook, below which to say so


def a2ats_index(sample: Sample, layer: LayerInfo) -> tuple[dict[str, np.ndarray], list[str]]:
    """``metric`` ``(H, D, D)`` and ``codebook`` ``(H, P, K, d)`` at the default settings, and remarks."""
    queries, keys = (sample.parts[name][None].astype(mx.float32) for name in ("queries", "keys"))
    if isinstance(layer.rope, Rotation):
        at = mx.array(sample.positions.astype(np.int32))[None, None]
        queries, keys = layer.rope.turn(queries, Default.a2ats_b - at), layer.rope.turn(keys, -at)
    metric = factored(moments(queries, sample.kv_heads), Default.a2ats_beta)
    books = fit_books(keys @ lower(metric), Default.a2ats_codebook_bits, Default.a2ats_sub_dim, seed=42)
    n, told = keys.shape[2], []
    if n < WANTED << Default.a2ats_codebook_bits:
        told.append(
            f"layer {sample.index}: {n} keys for {1 << Default.a2ats_codebook_bits} entries: give a longer text"
        )
    return {"metric": np.array(metric[0]), "codebook": np.array(books[0].astype(mx.float32))}, told
