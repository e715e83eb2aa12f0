"""The one attention entry: chooses how a call is computed from what the store holds, and says which way it went."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

import mlx.core as mx

from ..codecs.base import cast, compute_dtype, take_rows
from . import blockwise, masks, reference
from .kernels import Kernels

if TYPE_CHECKING:
    from ..cache.store import Store
    from ..policies.eviction import Retrieval

# Changes keys ``(B, H, n, D)``, whose first one is stored row ``start``, before attention sees them.
KeyView = Callable[[mx.array, int], mx.array]


class Path(str, Enum):
    """How one attention call was computed; the receipt names it."""

    FUSED = "mlx fused attention on float rows"
    RETRIEVED = "mlx fused attention on the rows retrieved"
    SHUT = "over all rows, those not retrieved shut out"
    KERNEL = "on packed data, by a kernel"
    PACKED = "on packed data"
    BLOCKWISE = "on packed data, block by block"
    REFERENCE = "float32 reference on decoded rows"


def attention(
    store: Store,
    q: mx.array,
    scale: float,
    mask: masks.Mask,
    sinks: mx.array | None,
    key_view: KeyView | None = None,
    retrieval: Retrieval | None = None,
    compute: mx.Dtype | None = None,
    kernels: Kernels | None = None,
) -> tuple[mx.array, Path]:
    """Attention of ``q`` ``(B, Hq, L, D)`` over everything that the store holds, in q's dtype.

    ``mask`` has one column per stored row (``masks.for_rows``). A single query attends to the rows that ``retrieval``
    names. ``compute`` is the dtype of the products, None for the rows' own (packed data: the best of this device).
    Scores go through one float32 softmax. Without ``kernels`` MLX's own operations do all.
    """
    plain = key_view is None and retrieval is None
    if kernels is not None and plain and (out := kernels.again(store, q, scale, mask, sinks)) is not None:
        return out, Path.KERNEL
    chosen = None if retrieval is None or q.shape[2] > 1 else retrieval.select(store, q, scale)
    read = chosen is not None and mask is None and not store.sealed
    if chosen is not None and not read:  # the same numbers without the savings
        mask = masks.only(mask, chosen, store.n, q.shape[1])
    if not store.sealed:
        keys, values = store.keys.dense(), store.values.dense()
        if read and chosen is not None:
            keys, values = take_rows(keys, chosen), take_rows(values, chosen)
        keys, x = keys if key_view is None else key_view(keys, 0), q
        if compute is not None:
            x, keys, values = (a.astype(compute) for a in (q, keys, values))
        out = mx.fast.scaled_dot_product_attention(x, keys, values, scale=scale, mask=mask, sinks=sinks)
        return out.astype(q.dtype), Path.RETRIEVED if read else Path.FUSED if chosen is None else Path.SHUT
    if kernels is not None:
        out = kernels.attend(store, q, scale, mask, sinks, plain=key_view is None and chosen is None)
        if out is not None:
            return out, Path.KERNEL
    # Few query rows: scores over the packed rows are small. Many: they would outgrow a block of decoded rows.
    few = q.shape[2] * q.shape[1] // store.keys.heads <= 2 * q.shape[3]
    x = cast(q, compute or (compute_dtype if few else blockwise.product_dtype)(q.dtype))
    out = (_packed if few else blockwise.attention)(store, x, scale, mask, sinks, key_view)
    path = Path.PACKED if few else Path.BLOCKWISE
    return out.astype(q.dtype), path if chosen is None else Path.SHUT


def decoded(
    store: Store,
    q: mx.array,
    scale: float,
    mask: masks.Mask,
    sinks: mx.array | None,
    key_view: KeyView | None = None,
    retrieval: Retrieval | None = None,
) -> tuple[mx.array, Path]:
    """The same by the float32 reference: slow, for comparison."""
    chosen = None if retrieval is None or q.shape[2] > 1 else retrieval.select(store, q, scale)
    if chosen is not None:
        mask = masks.only(mask, chosen, store.n, q.shape[1])
    keys, values = store.keys.dense(dtype=mx.float32), store.values.dense(dtype=mx.float32)
    keys = keys if key_view is None else key_view(keys, 0)
    return reference.attention(q, keys, values, scale, mask, sinks), Path.REFERENCE


def _packed(
    store: Store, q: mx.array, scale: float, mask: masks.Mask, sinks: mx.array | None, key_view: KeyView | None
) -> mx.array:
    """Attention by MLX's operations on the codes: scores of all rows at once, so ``q`` must have few."""
    b, hq, length, d = q.shape
    h, n = store.keys.heads, store.n
    # Query heads of one kv head become rows, so that the codes are read once.
    rows = (q * scale).astype(q.dtype).reshape(b, h, hq // h * length, d)
    scores = store.keys.scores(rows)
    if key_view is not None:  # changed keys are sinks, which are floats
        first = key_view(store.keys.dense(0, store.keys.sinks.n or n, q.dtype), 0)
        scores = mx.concatenate([rows @ first.swapaxes(-1, -2), scores[..., first.shape[2] :]], axis=-1)
    scores = scores.reshape(b, h, hq // h, length, n)
    weights = reference.softmax(masks.apply(scores, mask, past=n - length), sinks)
    out = store.values.mix(weights.astype(q.dtype).reshape(b, h, hq // h * length, n))
    return out.reshape(b, hq, length, out.shape[-1])
