"""A2ATS: a vector-quantised index of keys before RoPE tells which tokens a query reads; keys and values stay whole.

Paper: He et al., "A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position Embedding and Query-Aware
Vector Quantization", Findings of ACL 2025, arXiv:2502.12665. Paper setting: one code of 12 bits for the whole key
(a2ats_sub_dim = head_dim), a window of 64, no shrinkage (a2ats_beta = 0), 3 % of the tokens.

Memory does not shrink: the index comes on top. A decoded token reads fewer rows: the first 8, the newest
``a2ats_window`` and a share of the others; prompts and verified drafts read everything. To save memory as well, pair
it: ``[a2ats, kivi]``; then everything is read, with the same result as if the chosen rows were.

Query statistics and codebooks belong to a model: make them once with ``veloxquant calibrate --method a2ats`` and pass
them as ``store``, or pass arrays: ``a2ats_query_h`` ``(H, D, D)`` or ``(D, D)``, second moments of queries moved to
position ``a2ats_b``, and with them a codebook of ``k L`` (``L L^T`` their shrunk form), ``(K, d)``, ``(H, K, d)``,
``(P, K, d)`` (where H = P: per head) or ``(H, P, K, d)``. What is missing is fitted on the prompt when it ends
[design], or once there are 64 tokens. [design] ``a2ats_beta`` shrinks the statistics towards the identity (0: the
paper, 1: as without a2ats_use_query_aware); product codes; the query heads of a kv head share rows, by their largest
estimate.
"""

# ruff: noqa: RUF009 (option is a dataclass field that carries metadata)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..artifacts.calibration import calibrated
from ..core.types import Recipe, Stream
from ..models.rope import Rotation, UnknownRotation, probe_rotation
from ..policies.eviction import UNLIMITED, Eviction
from ..policies.index import SINKS, VectorIndex, factored
from ._codebooks import as_numpy, codebook
from ._method import ARRAY, FLAG, MethodInfo, Valid, floats, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class A2ATSOptions:
    """Options of ``a2ats``."""

    a2ats_codebook_bits: int = option(8, "bits of a code", ints(1, 16))
    a2ats_sub_dim: int = option(8, "numbers per code", ints(1))
    a2ats_window: int = option(128, "newest tokens that are always read", ints(0))
    a2ats_b: int = option(2048, "distance beyond which positions count as equal", ints(0))
    a2ats_use_query_aware: bool = option(True, "weigh the fit by the queries", FLAG)
    a2ats_beta: float = option(0.5, "shrinkage of the query statistics", floats("[0, 1]"))
    a2ats_retrieval_fraction: float = option(0.2, "share of tokens that a query reads", floats("(0, 1]"))
    a2ats_rope_base: float = option(10000.0, "RoPE base where no model is at hand", floats("(1, inf)"))
    a2ats_rope_scaling: Any = option(
        None,
        "RoPE scaling of the model's configuration",
        Valid("None or a dict", lambda v: v is None or isinstance(v, dict)),
    )
    a2ats_query_h: Any = option(None, "second moments of the queries", ARRAY)
    a2ats_codebook: Any = option(None, "codebook of the keys", ARRAY)


INFO = MethodInfo(
    name="a2ats",
    title="A2ATS",
    family="retrieval",
    paper="A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position Embedding and Query-Aware "
    "Vector Quantization",
    arxiv="2502.12665",
    venue="Findings of ACL 2025",
    needs="real queries, calibration, rope",
    reads={"n_calib_tokens": optional(ints(1))},
    options=A2ATSOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    sub_dim, book, h = config.a2ats_sub_dim, config.a2ats_codebook, config.a2ats_query_h
    if config.head_dim % sub_dim:
        refuse("a2ats_sub_dim", sub_dim, f"a divisor of head_dim = {config.head_dim}", "Choose a divisor.")
    if book is not None and book.shape[-1] != sub_dim:
        valid = f"a codebook whose last axis is a2ats_sub_dim = {sub_dim}"
        refuse("a2ats_codebook of shape", tuple(book.shape), valid, "Fit it for this a2ats_sub_dim.")
    if book is not None and (book.ndim < 2 or book.shape[-2] != 1 << config.a2ats_codebook_bits):
        valid = f"a codebook of 2 ** a2ats_codebook_bits = {1 << config.a2ats_codebook_bits} entries"
        refuse("a2ats_codebook of shape", tuple(book.shape), valid, "Fit it for these bits.")
    if book is not None and h is None:
        refuse("a2ats_query_h", None, "the array that a2ats_codebook was fitted with", "Pass both or neither.")
    if h is not None and (h.ndim not in (2, 3) or h.shape[-1] != h.shape[-2] or not np.isfinite(as_numpy(h)).all()):
        refuse("a2ats_query_h of shape", tuple(h.shape), "finite numbers (H, D, D) or (D, D)", "Give second moments.")
    if config.a2ats_rope_scaling is not None:
        _own_rotation(config, config.head_dim)


def _own_rotation(config: FlatConfig, dim: int) -> Rotation:
    """The rotation that the configuration describes."""
    from mlx_lm.models.rope_utils import initialize_rope

    scaling = config.a2ats_rope_scaling
    try:
        return probe_rotation(initialize_rope(dim, config.a2ats_rope_base, False, scaling), dim)
    except (ValueError, KeyError, TypeError) as error:
        refuse("a2ats_rope_scaling", scaling, "a scaling that mlx_lm knows", f"It says: {error}")


def _rotation(config: FlatConfig, layer: LayerInfo) -> tuple[Rotation | None, tuple[str, ...]]:
    """What turns the keys of ``layer``: its own module, or the configuration where no model is at hand."""
    default = type(config)
    own = config.a2ats_rope_base != default.a2ats_rope_base or config.a2ats_rope_scaling is not None
    if layer.rope is None and layer.query_heads is None:
        return _own_rotation(config, layer.head_dim), ()
    if isinstance(layer.rope, UnknownRotation):
        return None, (f"keys are compared after their rotary positions, not before: {layer.rope.reason}",)
    if layer.rope is not None and own:
        told = _own_rotation(config, layer.head_dim)
        if not np.allclose(np.sort(np.abs(told.rate)), np.sort(np.abs(layer.rope.rate)), rtol=1e-3):
            name = "a2ats_rope_base" if config.a2ats_rope_scaling is None else "a2ats_rope_scaling"
            refuse(name, getattr(config, name), "left out, or what the model's own layers do", "The model knows it.")
    return layer.rope, ()


def _given(config: FlatConfig, layer: LayerInfo, shrink: float) -> tuple[mx.array | None, mx.array | None, bool]:
    """Metric ``(H | 1, D, D)`` and float16 codebooks ``(H | 1, P | 1, K, d)``, if known, and whether from the store."""
    heads, dim, sub = layer.kv_heads, layer.head_dim, config.a2ats_sub_dim
    places, count = dim // sub, 1 << config.a2ats_codebook_bits
    if config.a2ats_query_h is None:
        found = calibrated(config, layer, metric=(heads, dim, dim), codebook=(heads, places, count, sub))
        if found is None:
            return None, None, False
        if shrink != A2ATSOptions.a2ats_beta:
            valid = f"{A2ATSOptions.a2ats_beta}, with which the artifact was made"
            refuse("a2ats_beta", shrink, valid, "Leave it, or pass a2ats_query_h instead of the artifact.")
        return found["metric"], found["codebook"].astype(mx.float16), True
    h, book = mx.array(as_numpy(config.a2ats_query_h)), config.a2ats_codebook
    h = h[None] if h.ndim == 2 else h
    if h.shape[1] != dim or h.shape[0] not in (1, heads or h.shape[0]):
        valid = f"({heads}, {dim}, {dim}) or ({dim}, {dim})"
        refuse("a2ats_query_h of shape", tuple(h.shape), valid, "Measure it on the model that it is used with.")
    metric = factored(h, shrink)
    if book is None:
        return metric, None, False
    return metric, codebook("a2ats_codebook", book, heads, places).astype(mx.float16), False


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys and values as they are, and an index that says which of them a decoded token reads."""
    if layer.head_dim % config.a2ats_sub_dim:
        valid = f"a divisor of {layer.head_dim}, the size of a key in this layer"
        refuse("a2ats_sub_dim", config.a2ats_sub_dim, valid, "Choose a divisor.")
    shrink = config.a2ats_beta if config.a2ats_use_query_aware else 1.0
    rope, notes = _rotation(config, layer)
    metric, books, stored = _given(config, layer, shrink)
    if books is None:
        what = "codebooks" if metric is not None else "query statistics and codebooks"
        when = f"the first {config.n_calib_tokens} tokens" if config.n_calib_tokens else "the prompt"
        notes = (*notes, f"no {what} in the configuration or store: fitted on {when} when it ends")
    index = VectorIndex(
        config.a2ats_codebook_bits,
        config.a2ats_sub_dim,
        config.a2ats_window,
        config.a2ats_b,
        config.a2ats_retrieval_fraction,
        shrink,
        rope,
        config.n_calib_tokens,
        config.seed - layer.index,  # the same draws in all layers, wherever a split model starts to count
        metric,
        books,
    )
    share = config.a2ats_retrieval_fraction
    read = f"a decoded token reads {share:.0%} of the tokens, the first {SINKS} and the newest {config.a2ats_window}"
    return Recipe(
        keys=Stream(),
        values=Stream(),
        eviction=Eviction(UNLIMITED, score=index, retrieval=index),
        notes=(*notes, f"memory does not shrink: {read}"),
        from_store=stored,
    )
