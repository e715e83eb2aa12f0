"""The fields of ``KVCacheConfig`` that belong to no method, in three groups as they stand in the documentation."""

# ruff: noqa: RUF009 (option is a dataclass field that carries metadata)

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..core.abstractions import ArtifactStore
from ._method import ARRAY, BITS, FLAG, Valid, ints, one_of, option, optional

if TYPE_CHECKING:
    from ..cache.registry import MethodName

DTYPE = Valid(
    "None, mx.float16, mx.bfloat16 or mx.float32",
    lambda v: v is None or (isinstance(v, mx.Dtype) and v in (mx.float16, mx.bfloat16, mx.float32)),
)
STORE = Valid("None or an ArtifactStore", lambda v: v is None or isinstance(v, ArtifactStore))
OBSERVERS = Valid(
    "a list of objects with an on_event method",
    lambda v: isinstance(v, (list, tuple)) and all(callable(getattr(o, "on_event", None)) for o in v),
)
OPTIONS = Valid(
    "None or an options object of veloxquant_mlx.cache.options",
    lambda v: v is None or (is_dataclass(v) and not isinstance(v, type)),
)
NAME = Valid("the name of a method", lambda v: isinstance(v, str))


@dataclass
class CoreFields:
    """Fields that every method shares."""

    method: MethodName = option("turboquant_rvq", "compression method", NAME)
    head_dim: int = option(128, "size of an attention head; for_model takes it from each layer", ints(1))
    bit_width_inlier: int | list = option(2, "bits per number; a list holds one entry per attention layer", BITS)
    bit_width_outlier: int | None = option(None, "bits of the outlier channels; switches the split on", optional(BITS))
    jl_dim: int | None = option(None, "rows of the Johnson-Lindenstrauss sketch; None: head_dim", optional(ints(1)))
    n_outlier_channels: int | None = option(None, "outlier channels per head", optional(ints(0)))
    n_calib_tokens: int | None = option(None, "tokens seen before a fit is frozen", optional(ints(1)))
    enable_vectorized_attend: bool = option(True, "False: attend through the plain float32 reference path", FLAG)
    enable_outlier_two_stream: bool = option(False, "store outlier channels in a stream of their own", FLAG)
    enable_fused_query_dot: bool = option(False, "score rotated queries against the codebook directly", FLAG)
    seed: int = option(42, "seed of everything random; for_model adds the layer's index", ints(0))
    dtype: Any = option(None, "dtype of the products in attention; None: the dtype of the input", DTYPE)
    capacity: int | None = option(None, "most tokens that a cache may hold; None: no limit", optional(ints(1)))
    sliding_window: int | None = option(None, "keep the newest tokens only (standalone methods)", optional(ints(1)))
    store: ArtifactStore | None = option(None, "where rotations and codebooks are looked up and saved", STORE)
    observers: list = field(default_factory=list, metadata={"help": "receivers of events", "valid": OBSERVERS})
    options: object | None = option(None, "options object of the method", OPTIONS)


@dataclass
class SharedFields:
    """Fields that a few methods share."""

    n_sink_tokens: int = option(5, "first tokens that stay exact", ints(0))
    smooth_factors: Any = option(None, "per-channel scales of the keys", ARRAY)
    key_codebook: Any = option(None, "codebook of the keys", ARRAY)
    value_codebook: Any = option(None, "codebook of the values", ARRAY)


@dataclass
class KernelFields:
    """Fields that choose a kernel."""

    use_metal_kernels: bool | None = option(
        None,
        "decoding steps by a kernel (Metal, CUDA); None: where there is one, True: or an error, False: never",
        optional(FLAG),
    )
    fused_sdpa: bool | None = option(
        False,
        "prompts by a kernel; None: where fused_sdpa_memory_bound is set, True: or an error, False: block by block",
        one_of(None, False, True),
    )
    fused_sdpa_max_ctx: int | None = option(
        None, "most rows held up to which prompts go by a kernel; None: any", optional(ints(1))
    )
    fused_sdpa_memory_bound: bool = option(
        False, "memory counts: fused_sdpa=None takes the kernel, which decodes no block", FLAG
    )
