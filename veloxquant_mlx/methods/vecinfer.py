"""VecInfer: smoothed and Hadamard-rotated keys, product vector quantisation of keys and values.

Paper: Yao et al., "VecInfer: Efficient LLM Inference with Low-Bit KV Cache via Outlier-Suppressed Vector
Quantization", ACL 2026, arXiv:2510.06175. ``bit_width_inlier`` has no meaning here and is accepted without effect.

Smoothing factors and codebooks belong to a model: make them once with ``veloxquant calibrate --method vecinfer`` and
pass them as ``store``, or pass arrays of your own: ``smooth_factors`` ``(H, D)`` and codebooks ``(K, d)``, one per head
``(H, K, d)``, one per place of the sub-vector in the row ``(P, K, d)`` (where H = P: per head) or ``(H, P, K, d)``.
What is missing is fitted on the prompt when it ends, or on its first ``n_calib_tokens`` tokens [design]: smoothing
factors are then frozen, so that larger keys later on only lose accuracy, and heads share a codebook after their spread
is divided out. On fewer than 512 tokens the codebook is that of normal numbers, which Hadamard-rotated keys nearly are;
values are then rotated as well. Codebooks are never random. Head sizes without a Hadamard transform are turned in
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..artifacts.calibration import calibrated
from ..codecs.base import ALL
from ..codecs.vectors import ENOUGH, ProductVectors
from ..core.types import Recipe, Stream
from ..transforms.hadamard import BlockHadamard
from ._codebooks import as_numpy, codebook
from ._method import ARRAY, MethodInfo, Valid, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

CHUNK = 32
FEWEST = 64  # tokens of a fit


@dataclass
class VecInferOptions:
    """Options of ``vecinfer``."""

    key_sub_dim: int = option(4, "numbers per key code", ints(1))
    value_sub_dim: int = option(8, "numbers per value code", ints(1))
    key_codebook_bits: int = option(12, "bits of a key code", ints(1, 16))
    value_codebook_bits: int = option(8, "bits of a value code", ints(1, 16))
    residual_length: int = option(128, "newest tokens that stay exact", ints(0))


INFO = MethodInfo(
    name="vecinfer",
    title="VecInfer",
    family="vector quantization",
    paper="VecInfer: Efficient LLM Inference with Low-Bit KV Cache via Outlier-Suppressed Vector Quantization",
    arxiv="2510.06175",
    venue="ACL 2026",
    needs="calibration",
    reads={
        "bit_width_inlier": Valid("anything", lambda v: True),
        "n_calib_tokens": optional(ints(1)),
        "smooth_factors": ARRAY,
        "key_codebook": ARRAY,
        "value_codebook": ARRAY,
    },
    options=VecInferOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    for side in ("key", "value"):
        sub_dim, book = getattr(config, f"{side}_sub_dim"), getattr(config, f"{side}_codebook")
        if config.head_dim % sub_dim:
            valid = f"a divisor of head_dim = {config.head_dim}"
            refuse(f"{side}_sub_dim", sub_dim, valid, "Codebooks are made for one head size: choose a divisor.")
        shape = (2 ** getattr(config, f"{side}_codebook_bits"), sub_dim)
        if book is not None and tuple(book.shape[-2:]) != shape:
            valid = f"a codebook whose last two axes are {shape}"
            refuse(f"{side}_codebook of shape", tuple(book.shape), valid, "Fit it for these bits and this sub_dim.")
    smooth = config.smooth_factors
    if smooth is not None and not (np.isfinite(factors := as_numpy(smooth)) & (factors > 0)).all():
        remedy = "They divide the keys: use the root of the largest size of each channel."
        refuse("smooth_factors", smooth, "an array of finite numbers above 0", remedy)


def _factors(config: FlatConfig, layer: LayerInfo) -> mx.array | None:
    """The smoothing factors of the configuration as ``(H | 1, D)``."""
    if config.smooth_factors is None:
        return None
    x = mx.array(as_numpy(config.smooth_factors))
    shape, dim = tuple(x.shape), layer.head_dim
    if shape not in ((dim,), (1, dim)) and (
        x.ndim != 2 or x.shape[1] != dim or layer.kv_heads not in (None, x.shape[0])
    ):
        valid = f"an array (H, D) = ({layer.kv_heads}, {dim}), or (D,) for all heads"
        refuse("smooth_factors of shape", shape, valid, "Fit them on the model that they are used with.")
    return x.reshape(-1, dim)


def _book(config: FlatConfig, layer: LayerInfo, side: str, dim: int) -> mx.array | None:
    """The codebook of the configuration as ``(H | 1, P | 1, K, d)``."""
    book = getattr(config, f"{side}_codebook")
    if book is None:
        return None
    return codebook(f"{side}_codebook", book, layer.kv_heads, dim // getattr(config, f"{side}_sub_dim"))


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys and values of a token are coded on their own once ``residual_length`` newer ones exist, 32 at a time."""
    window, calib, notes = config.residual_length, config.n_calib_tokens, []
    arrays = {
        "smooth_factors": _factors(config, layer),
        "key_codebook": _book(config, layer, "key", layer.head_dim),
        "value_codebook": _book(config, layer, "value", layer.value_dim),
    }
    spread = None
    if (stored := _stored(config, layer)) is not None:
        spread = stored.pop("value_spread") if arrays["value_codebook"] is None else None
        arrays = {name: stored[name] if a is None else a for name, a in arrays.items()}
        notes.append("arrays that the configuration does not have are from the calibration artifact")
    elif missing := [name for name, a in arrays.items() if a is None]:
        when = f"the first {calib} tokens" if calib else "the prompt when it ends"
        notes.append(f"no {', '.join(missing)} in the configuration or store: fitted on {when}")
        if any(name.endswith("codebook") for name in missing):
            notes.append(f"on fewer than {ENOUGH} tokens: codebooks for normal numbers, and values rotated for theirs")
    if config.bit_width_inlier != type(config).bit_width_inlier:
        notes.append("bit_width_inlier has no effect: the widths are those of the codebooks")

    def stream(side: str, dim: int, smooth: mx.array | None) -> Stream:
        bits, sub = getattr(config, f"{side}_codebook_bits"), getattr(config, f"{side}_sub_dim")
        if dim % sub:
            valid = f"a divisor of {dim}, the size of a {side} in this layer"
            refuse(f"{side}_sub_dim", sub, valid, "Codebooks are made for one head size: choose a divisor.")
        codec = ProductVectors(
            bits,
            sub,
            BlockHadamard(dim),
            dim=dim,
            channels=side == "key",
            fit_rows=calib or ALL,
            seed=config.seed,
            smooth=smooth,
            book=arrays[f"{side}_codebook"],
        )
        return Stream(codec, window=window, chunk=CHUNK, fit_rows=calib or max(FEWEST, window + CHUNK))

    return Recipe(
        keys=stream("key", layer.head_dim, arrays["smooth_factors"]),
        values=stream("value", layer.value_dim, spread),
        deferred=calib is None and any(a is None for a in arrays.values()),
        notes=tuple(notes),
        from_store=stored is not None,
    )


def _stored(config: FlatConfig, layer: LayerInfo) -> dict[str, mx.array] | None:
    """Factors ``(H, D)``, codebooks ``(1, 1, K, d)`` and spreads of values ``(H, 1)`` of the artifact, or None."""
    heads, dim = layer.kv_heads, layer.head_dim
    books = {s: (1 << getattr(config, f"{s}_codebook_bits"), getattr(config, f"{s}_sub_dim")) for s in ("key", "value")}
    found = calibrated(
        config,
        layer,
        smooth_factors=(heads, dim),
        value_spread=(heads, 1),
        key_codebook=books["key"],
        value_codebook=books["value"],
    )
    if found is None:
        return None
    return found | {f"{side}_codebook": found[f"{side}_codebook"][None, None] for side in books}
