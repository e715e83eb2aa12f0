"""The small value types that methods and caches exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import mlx.core as mx

if TYPE_CHECKING:
    from ..codecs.base import Codec
    from ..coordinators.sinks import Emergence
    from ..models.bias import KeyBias
    from ..models.rope import Rotation, UnknownRotation
    from ..policies.eviction import Eviction
    from ..policies.guide import Guide


# A chunk that never fills: what comes after the block of the prompt stays as it is.
NEVER = 1 << 30
# Rows that are sealed together where a method asks for no other number.
SEAL = 8


def is_int(value: Any) -> TypeGuard[int]:
    """True for a plain int (what a saved cache can hold); a bool is not an integer here."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class LayerInfo:
    """What a method may know about the layer it is built for.

    ``index`` counts the entries of the model's cache list, ``rank`` and ``n_layers`` only the layers that the method
    is applied to. ``rope`` is the rotation that the layer gives its keys (``models.rope``), None where it gives none or
    no model is at hand. ``key_bias`` is the constant part of its keys, where it is large against the rest. ``shared``:
    another layer reads the same rows later in the same step. ``batches``: its attention can take a mask per sequence;
    where it cannot, sequences run one by one. ``emergence``: how the hidden state before this layer tells sinks, or why
    it does not; None where no method asked. It is number ``member`` of the ``members`` layers of ``group``, which some
    methods pack together; alone where no method asked. ``derived``: what a method made of the layer's weights, arrays
    or the reason why there are none.
    """

    head_dim: int = 128
    value_dim: int = 128
    kv_heads: int | None = None
    query_heads: int | None = None
    index: int = 0
    rank: int = 0
    n_layers: int = 1
    rope: Rotation | UnknownRotation | None = None
    key_bias: KeyBias | None = None
    shared: bool = False
    batches: bool = True
    emergence: Emergence | str | None = None
    group: int = 0
    member: int = 0
    members: int = 1
    derived: Mapping[str, mx.array | str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Stream:
    """How one tensor (keys or values) of a layer is stored, as a function of the row count alone.

    Rows run ``[sinks | prompt | sealed | tail]``: the first ``sinks`` rows and the newest rows stay in the model's
    dtype; the rest is sealed by ``codec`` in chunks of ``chunk`` rows as soon as ``window`` newer rows exist. Where
    a method asks for no other length, chunks are of ``SEAL`` rows [design]: the papers pack token by token, but one row
    costs as much time as eight, and packing one for every token took half of a decoding step.
    ``codec=None`` keeps everything as it came. With a ``prompt`` codec (which needs ``Recipe.deferred``) all rows of
    the first prompt that are due at its end become one block of that codec, whatever their number; if it asks for a
    fit, that of ``codec`` on the prompt's rows, once there are enough, serves both. With a ``rotation``
    (of keys) codecs see rows as they were before it, and without ``bias`` where there is one. ``dtype`` casts the rows
    on arrival, None keeps the model's. ``fit_rows`` fits the codec on fewer rows than it asks for. ``bounded`` says
    that a policy caps the float rows, so that no room to grow is held. ``older`` lists ages in rising order, each with
    a coarser codec, of the same ``chunk``: rows move on from codec to codec as so many newer rows come.
    """

    codec: Codec | None = None
    prompt: Codec | None = None
    window: int = 0
    chunk: int = SEAL
    sinks: int = 0
    rotation: Rotation | None = None
    bias: KeyBias | None = None
    fit_rows: int | None = None
    dtype: mx.Dtype | None = None
    bounded: bool = False
    older: tuple[tuple[int, Codec], ...] = ()

    @property
    def first_rows(self) -> int:
        """Rows that the codec is fitted on; nothing is sealed before there are so many after the sinks."""
        own = self.codec.fit_rows if self.codec is not None else 0
        return own if self.fit_rows is None else min(self.fit_rows, own)

    @property
    def grows(self) -> bool:
        """Whether float rows only ever become more."""
        return not self.bounded and (self.codec is None or self.chunk >= NEVER)

    def n_sealed(self, rows: int, fitted: bool = False) -> int:
        """Rows that ``codec`` holds after ``rows`` rows, those of a prompt block left out of account.

        Independent of how the rows arrived. A codec that is not ``fitted`` yet waits for the rows of its fit.
        """
        if self.codec is None or (not fitted and rows < self.sinks + self.first_rows):
            return 0
        return self.n_aged(rows, self.window)

    def n_due(self, rows: int) -> int:
        """Rows that have left the window, whole chunks or not."""
        return max(0, rows - self.sinks - self.window)

    def n_aged(self, rows: int, age: int) -> int:
        """Rows after the sinks, in whole chunks, that ``age`` newer rows follow."""
        return max(0, rows - self.sinks - age) // self.chunk * self.chunk


@dataclass(frozen=True)
class Recipe:
    """What a method builds: the storage of keys and values, what may be dropped, and notes for the receipt.

    ``deferred``: nothing is sealed before the prompt ends. ``guide`` tells the codecs what the model's queries attend
    to. ``protected``: so many tokens that ``coordinators.sinks`` finds stay exact. ``most`` names a field and the
    tokens that it lets in. ``from_store`` says that constants came out of ``config.store``: without it the recipe
    cannot be built again. ``together``: so many layers are sealed together, in ``codecs.joint`` (``cache.joint``).
    ``most_raw`` names a field and the tokens that may wait for that: at so many a ``deferred`` recipe waits no longer
    for the end of the prompt, and a call that brings more is a line in the receipt.
    """

    keys: Stream
    values: Stream
    eviction: Eviction | None = None
    deferred: bool = False
    guide: Guide | None = None
    protected: int = 0
    most: tuple[str, int] | None = None
    notes: tuple[str, ...] = ()
    from_store: bool = False
    together: int = 1
    most_raw: tuple[str, int] | None = None
