"""AnchorKV: a few anchor tokens exact, the others as scaled residuals to their anchor.

Paper: Khalaf et al., "AnchorKV: Anchor-Residual KV Cache Compression", arXiv:2608.02901 (preprint).
"""

from __future__ import annotations

from dataclasses import dataclass

from ._method import MethodInfo, floats, ints, option


@dataclass
class AnchorKVOptions:
    """Options of ``anchorkv``."""

    anchorkv_theta: float = option(0.05, "share of the memory of 16-bit rows that may be used", floats("(0, 1]"))
    anchorkv_window: int = option(32, "newest tokens that stay exact", ints(1))
    anchorkv_rho: float = option(0.7, "share of the memory for residuals", floats("[0, 1]"))
    anchorkv_anchor_frac: float = option(0.0078125, "share of tokens that are anchors", floats("(0, 1]"))
    anchorkv_residual_bits: int = option(2, "bits per number of a residual", ints(1, 4))
    anchorkv_seed: int = option(42, "seed of the rotation of the residuals", ints(0))


INFO = MethodInfo(
    name="anchorkv",
    title="AnchorKV",
    family="vector quantization",
    paper="AnchorKV: Anchor-Residual KV Cache Compression",
    arxiv="2608.02901",
    needs="real queries, rope",
    options=AnchorKVOptions,
)
