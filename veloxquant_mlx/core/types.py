"""The small value types that methods and caches exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import mlx.core as mx

if TYPE_CHECKING:
    from ..codecs.base import Codec
    from ..models.rope import Rotation, UnknownRotation
    from ..policies.eviction import Eviction


def is_int(value: Any) -> TypeGuard[int]:
    """True for a plain int (what a saved cache can hold); a bool is not an integer here."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class LayerInfo:
    """What a method may know about the layer it is built for.

    ``index`` counts the entries of the model's cache list, ``rank`` and ``n_layers`` only the layers that the method
    is applied to. ``rope`` is the rotation that the layer gives its keys (``models.rope``), None where it gives none or
    no model is at hand. ``shared``: another layer reads the same rows later in the same step. ``batches``: its
    attention can take a mask per sequence; where it cannot, sequences run one by one.
    """

    head_dim: int = 128
    value_dim: int = 128
    kv_heads: int | None = None
    query_heads: int | None = None
    index: int = 0
    rank: int = 0
    n_layers: int = 1
    rope: Rotation | UnknownRotation | None = None
    shared: bool = False
    batches: bool = True


@dataclass(frozen=True)
class Stream:
    """How one tensor (keys or values) of a layer is stored, as a function of the row count alone.

    Rows run ``[sinks | sealed | tail]``: the first ``sinks`` rows and the newest rows stay in the model's dtype; the
    rest is sealed by ``codec`` in chunks of ``chunk`` rows as soon as ``window`` newer rows exist. ``codec=None``
    keeps everything as it came. ``dtype`` casts the rows on arrival, None keeps the model's.
    ``bounded`` says that a policy caps the float rows, so that no room to grow is held.
    """

    codec: Codec | None = None
    window: int = 0
    chunk: int = 1
    sinks: int = 0
    dtype: mx.Dtype | None = None
    bounded: bool = False

    def n_sealed(self, rows: int) -> int:
        """Sealed rows after ``rows`` rows: independent of how they arrived."""
        if self.codec is None:
            return 0
        return max(0, rows - self.sinks - self.window) // self.chunk * self.chunk


@dataclass(frozen=True)
class Recipe:
    """What a method builds: the storage of keys and values, what may be dropped, and notes for the receipt.

    ``from_store`` says that constants came out of ``config.store``: without it the recipe cannot be built again.
    """

    keys: Stream
    values: Stream
    eviction: Eviction | None = None
    notes: tuple[str, ...] = ()
    from_store: bool = False
