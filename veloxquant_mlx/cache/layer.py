"""The serving cache of one layer: mlx_lm's cache protocol around a store, an attention entry and a policy."""

from __future__ import annotations

import copy
import dataclasses
import operator
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.base import create_causal_mask

from ..attention import entry, hook, masks
from ..attention.hook import KVHandle
from ..attention.kernels import Kernels
from ..codecs.base import take_rows
from ..coordinators.joint import Joint
from ..core.exceptions import CacheInputError, CacheStateError, QuantizerConfigError
from ..core.types import LayerInfo, Recipe
from ..observers.reporter import Reporter
from . import joint
from . import state as saved
from .checks import FiniteWatch, check_rows
from .compose import compose
from .lifecycle import Lifecycle, Phase
from .registry import method
from .store import Store

if TYPE_CHECKING:
    from ..coordinators.base import Coordinator
    from .base import KVCacheConfig
    from .batch import CompressedBatchCache

    _Base = Any  # mlx_lm has no types; what a checker infers from its code is no contract
else:
    _Base = mlx_cache.KVCache


class Mode(Enum):
    """Whether the model's attention comes back to this cache; learned from the first update."""

    LEARN = "not yet known"
    HANDLE = "attends through the cache"
    ARRAY = "attends on decoded arrays (the model's own attention)"


class _Absent:
    """An inherited name that must look absent to ``hasattr``: mlx_lm acts on its mere presence."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise AttributeError(f"CompressedKVCache has no attribute {self.name!r}")


class _Merge:
    """``merge``, absent where the model's attention takes no mask per sequence: the server then runs one by one."""

    def __get__(
        self, instance: CompressedKVCache | None, owner: type
    ) -> Callable[[Sequence[CompressedKVCache]], CompressedBatchCache]:
        from .batch import CompressedBatchCache  # which imports this module

        if instance is not None and not instance.layer.batches:
            raise AttributeError("merge: this model's attention cannot take a mask per sequence")
        return CompressedBatchCache.merge


class CompressedKVCache(_Base):
    """Keys and values of one layer, held compressed by ``config.method``.

    ``update_and_fetch`` only appends; ``attend`` computes over everything held with the model's real queries, then
    rows that left their window are encoded and rows that the policy gives up are dropped (``lifecycle.py``). Counters
    are Python ints. Decoding does not wait for the device, save where chunkkv exceeds its ``capacity``, and once for
    every block of rows of which minicache or xkv keep some exact; a prompt does where a policy drops rows (so that
    their memory is free at once), where it attends block by block, and where gear chooses its rank by energy. With
    observers every event waits.

    ``offset`` is the number of tokens seen (the position of the next token), whatever is still held. Geometry and
    dtype come from the first update. Raises CacheInputError for tensors that do not fit (the cache is unchanged) and
    CacheStateError for non-finite rows, a full ``capacity`` and impossible trims.
    """

    step: int = 1  # mlx_lm's growth step; the store has its own
    to_quantized = _Absent()
    merge = _Merge()

    def __init__(self, config: KVCacheConfig, layer: LayerInfo | None = None, packing: KVCacheConfig | None = None):
        """``packing`` packs the rows that ``config.method`` keeps (``cache.compose``)."""
        self._config, self._packing = config, packing
        self._build(layer or LayerInfo(head_dim=config.head_dim, value_dim=config.head_dim))
        self._reset()

    def _build(self, layer: LayerInfo) -> None:
        """Recipe, store and life cycle for ``layer``; nothing is held afterwards."""
        config = self._config
        self._layer = layer
        self._recipe: Recipe = method(config.method).recipe(config, layer)
        if (packing := self._packing) is not None:
            packed = method(packing.method).recipe(packing, layer)
            self._recipe = compose(self._recipe, packed, (config.method, packing.method))
        if layer.key_bias is not None:
            self._recipe = layer.key_bias.taken_out(self._recipe)
        ev, together = self._recipe.eviction, self._recipe.together
        self._coordinator = Joint(layer.group, together) if together > 1 else None if ev is None else ev.coordinator
        self._store = Store(self._recipe)
        self._life = Lifecycle(self._recipe, config.capacity, Reporter(config.observers, self.method, layer.index))

    def _reset(self) -> None:
        self.offset = 0
        self.shared = self._layer.shared  # or set by the seam: another layer reads these rows too
        self._mode = Mode.LEARN
        self._issued: tuple[mx.array, mx.array] | None = None
        self._watch = FiniteWatch()
        self._paths: set[entry.Path] = set()
        self._kernels = Kernels(self._config)
        self.peers: Sequence[weakref.ref[CompressedKVCache]] = ()  # the layers of the latest forward, this included
        self.notes: tuple[str, ...] = ()  # what a coordinator adds to the receipt

    # ------------------------------------------------------------------------------------------- protocol of mlx_lm

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append ``keys`` ``(B, H, S, Dk)`` and ``values`` ``(B, H, S, Dv)``; what comes back goes to attention."""
        if self._mode is Mode.LEARN and self._issued is not None:
            self._check(keys, values)
            self.use_arrays()
        self.append(keys, values)
        return self._issue((keys, values) if self.offset == keys.shape[2] else None)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last update returned, for layers that share another layer's keys and values."""
        self.shared = True
        if self._mode is Mode.HANDLE or self._issued is None:
            return self._issue(None)
        return self._issued

    def attend(
        self, queries: mx.array, *, scale: float, mask: mx.array | str | None = None, sinks: mx.array | None = None
    ) -> mx.array:
        """Attention of ``queries`` ``(B, Hq, L, Dk)`` over everything held, ``(B, Hq, L, Dv)`` in the queries' dtype.

        ``mask`` as in ``mx.fast.scaled_dot_product_attention``; an array has one column per token seen. ``sinks``
        ``(Hq,)`` are learned sink logits.
        """
        store = self._store
        if self.offset == 0:
            raise CacheStateError("attend on an empty cache; call update_and_fetch first")
        self._mode, self._issued = Mode.HANDLE, None
        if mask is not None:
            mask = masks.for_rows(mask, self.offset, store.n, store.positions, queries.shape[1])
        if store.holes:
            mask = masks.without_holes(mask, store, queries.shape[2], queries.shape[1])
        view, retrieval = self._key_view(), None if self._recipe.eviction is None else self._recipe.eviction.retrieval
        if self._config.enable_vectorized_attend:
            out, path = entry.attention(
                store, queries, scale, mask, sinks, view, retrieval, self._config.dtype, self._kernels
            )
        else:
            out, path = entry.decoded(store, queries, scale, mask, sinks, view, retrieval)
        self._paths.add(path)
        self._life.attended(queries, scale, sinks)
        # What this call made is computed with its output: nothing lazy is left, which no other thread could compute.
        if not self.shared and self.settle():  # other readers of this step must find the same rows: see settle
            return mx.depends([out], [array for cache in joint.peers(self) for array in cache.every_array()])[0]
        return mx.depends([out], self.every_array())[0]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask for ``N`` new tokens: mlx_lm's shorthand where it says enough, else one column per token seen.

        Where the model attends on decoded arrays, one column per row that it will get.
        """
        if window_size is None and (N == 1 or not return_array):
            return None if N == 1 else "causal"
        if self._mode is Mode.HANDLE:
            return create_causal_mask(N, self.offset, window_size=window_size)
        self.settle()
        if self._mode is Mode.LEARN:
            self._store.compact()  # attention may still come back: it must find the rows that the mask counts
        if window_size is None:  # all rows held are older than the new ones
            return create_causal_mask(N, self.positions.shape[-1])
        if self.positions.shape[1] > 1:
            return create_causal_mask(N, self.offset, window_size=window_size)
        columns = mx.concatenate([self.positions[0, 0], mx.arange(self.offset, self.offset + N)])
        rows = mx.arange(self.offset, self.offset + N)[:, None]
        return (rows >= columns) & (rows < columns + window_size)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """Whether ``trim`` works: constant from construction on, since speculative decoding asks only once."""
        return not self._drops

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` tokens (at most all); returns how many. A method that drops rows cannot."""
        if not self.is_trimmable():
            raise CacheStateError(
                f"{self.method!r} drops tokens and cannot trim (asked: {n}); is_trimmable() is False for it. "
                "Start a new cache for the shorter text."
            )
        n = min(operator.index(n), self.offset)  # a numpy integer would end up in the saved header
        if n < 0:
            raise CacheInputError(f"trim: n={n}; valid: 0 or more")
        if n:
            self.settle()
            begun = self._life.reporter.begin(self._store)
            self.offset -= n
            if self._recipe.together > 1:
                joint.trim(self)
            else:
                self._store.truncate(self.offset)
            self._issued = None
            if self.offset == 0:
                self._watch, self._life.phase = FiniteWatch(), Phase.EMPTY
            self._life.reporter.tell("trim", n, begun, self._store, self.offset)
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of every array that this cache keeps alive, the method's constants included."""
        return sum(self.held_bytes().values())

    @property
    def keys(self) -> list[mx.array] | None:
        """Every stored array: pipeline-parallel models hang dependencies on it (``cache.keys = mx.depends(...)``)."""
        return list(self._store.arrays().values()) or None

    @keys.setter
    def keys(self, arrays: list[mx.array]) -> None:
        self._store.set_arrays(dict(zip(self._store.arrays(), arrays, strict=True)))

    @property
    def values(self) -> None:
        """Nothing: keys and values are stored together; use ``materialize``."""
        return None

    @property
    def state(self) -> tuple[mx.array, ...]:
        """A header and every array, pending ones included: mlx_lm evaluates this between prompt chunks."""
        return saved.pack(self)

    @state.setter
    def state(self, arrays: Any) -> None:
        saved.unpack(self, arrays)

    @property
    def meta_state(self) -> str:
        return ""

    @meta_state.setter
    def meta_state(self, value: Any) -> None:
        if value:
            raise CacheInputError(f"meta_state={value!r}; valid: empty (everything is in state)")

    @classmethod
    def from_state(cls, state: Any, meta_state: Any = None) -> CompressedKVCache:
        """A cache from what ``state`` gave, without the model."""
        hook.install()  # for_model may never run in the process that loads a file
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def to_batch(self, left_padding: Sequence[int]) -> CompressedBatchCache:
        """mlx_vlm's way to a batch: one copy of this (empty) cache for each prompt, padded on the left."""
        from .batch import CompressedBatchCache

        return CompressedBatchCache([copy.deepcopy(self) for _ in left_padding], left_padding)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedKVCache:
        """An independent cache; arrays are shared until written, recipe and config always."""
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        clone._store = Store(self._recipe)
        clone._store.copy_from(self._store)
        clone._life = copy.copy(self._life)
        clone._issued, clone._paths, clone._watch = None, set(self._paths), copy.copy(self._watch)
        clone.peers, clone._kernels = (), Kernels(self._config)
        if self._recipe.together > 1 and self.peers:
            # One list for the clones of one call: they know each other once all of them are made.
            known = memo.setdefault(id(self.peers), [])
            known.append(weakref.ref(clone))
            clone.peers = known
            made = joint.peers(clone)
            if len({cache.offset for cache in made}) == 1:  # else a forward broke off, or they are not all trimmed yet
                joint.link(made)
        return clone

    # ------------------------------------------------------------------------------------------------- our own names

    def append(self, keys: mx.array, values: mx.array) -> None:
        """``update_and_fetch`` without handing anything out: for batches, which hand out for all their rows."""
        self._check(keys, values)
        self.settle()
        if self._recipe.together > 1:
            joint.check(self, keys.shape[2])
            self._note_wait(keys.shape[2])
        if self.offset == 0:
            self._fit_geometry(keys, values)
        self._watch.note(keys, values, self.offset)
        self._store.append(keys, values, self.offset)
        self.offset += keys.shape[2]
        self._life.new = keys.shape[2]

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Decoded keys ``(B, H, n, Dk)`` and values ``(B, H, n, Dv)`` of the rows held, in the dtype they came in."""
        if self._store.n == 0:
            raise CacheStateError("materialize on an empty cache; call update_and_fetch first")
        if self._recipe.together > 1 and not joint.linked(self):
            raise CacheStateError(
                f"layer {self._layer.index} shares what it holds with other layers, which were copied or loaded apart "
                "from it. Call the model with the whole list of caches first."
            )
        order, view = self._store.order(), self._key_view()
        # Of layers that are packed together, those trimmed first hold their rows until the others are trimmed too.
        stop = min(self._store.n, self.offset) if self._recipe.together > 1 else None
        keys, values = (
            rows if order is None else take_rows(rows, order)
            for rows in (
                stream.dense(stop=stop, dtype=stream.dtype) for stream in (self._store.keys, self._store.values)
            )
        )
        return view(keys, 0) if view else keys, values

    def settle(self) -> bool:
        """Act on the last update, once: observe its queries, drop rows, encode what left the windows.

        Where layers share rows, that is done by the next update. Returns whether layers that are packed together were
        packed now.
        """
        self._life.settle(self._store, self.offset)
        return self._recipe.together > 1 and joint.settle(self)

    def end_prefill(self) -> None:
        """Tell a policy that the prompt is complete. Only needed where the whole prompt came in one call."""
        if self.empty():
            return
        peers = [cache for ref in self.peers if (cache := ref()) is not None]
        if self.coordinator is not None and peers:
            self.coordinator.ends(peers)
        self._life.end_prefill(self._store, self.offset)
        if self._recipe.together > 1:
            joint.settle(self)

    @property
    def positions(self) -> mx.array:
        """Positions ``(B | 1, H | 1, n)`` int32 of the rows held, oldest first; -1 pads heads that keep fewer rows."""
        positions, order = self._store.positions_or_range(), self._store.order()
        return positions if order is None else mx.take_along_axis(positions, order, axis=-1)

    @property
    def coordinator(self) -> Coordinator | None:
        """Who decides across the layers of a model, where the method asks for that."""
        return self._coordinator

    @property
    def protected(self) -> int:
        """Tokens that stay exact in this cache wherever they stand, once ``coordinators.sinks`` finds them."""
        return self._recipe.protected

    @property
    def store(self) -> Store:
        """The rows held; for coordinators."""
        return self._store

    @property
    def life(self) -> Lifecycle:
        """When rows are dropped; for coordinators."""
        return self._life

    @property
    def needs_queries(self) -> bool:
        """Whether the method cannot work without the model's real queries."""
        return self._life.needs_queries

    @property
    def config(self) -> KVCacheConfig:
        return self._config

    @property
    def packing(self) -> KVCacheConfig | None:
        """The configuration of the method that packs what ``config.method`` keeps."""
        return self._packing

    @property
    def method(self) -> str:
        """The name of the method, or both names as in ``snapkv+kivi``."""
        return "+".join(c.method for c in (self._config, self._packing) if c is not None)

    @property
    def layer(self) -> LayerInfo:
        """The layer that feeds this cache, as far as it is known."""
        return self._layer

    def unsaved(self) -> list[str]:
        """Names of settings that ``state`` cannot hold: a state made with them cannot be read back."""
        return saved.unsaved(self)

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def batch_size(self) -> int:
        """Sequences of equal length held; 0 while empty."""
        return self._store.keys.batch if self._store.n else 0

    def held_bytes(self) -> dict[str, int]:
        """Bytes held by kind: ``packed`` codes, ``window`` float rows, ``index`` positions and policy, ``fixed``."""
        out = {"packed": 0, "window": 0, "index": 0, "fixed": 0}
        for name, array in self.arrays().items():
            stream, _, field = name.partition(".")
            kind = "window" if field in ("sinks", "tail", "exact") else "packed"
            out[kind if stream in ("k", "v") else "fixed" if name == saved.FINITE else "index"] += array.nbytes
        out["fixed"] += sum(a.nbytes for a in self.constants())
        return out

    def constants(self) -> list[Any]:
        """Rotations, tables and other arrays of the method; many are shared between layers and caches."""
        return saved.constants(self._recipe)

    def arrays(self) -> dict[str, mx.array]:
        """Every array held by name, the method's constants left out: what is stored and what waits to be acted on."""
        pending = {saved.QUERIES: self._life.queries, saved.SINKS: self._life.sinks}
        if self._watch.pending is not None:
            pending[saved.FINITE] = self._watch.pending[1]
        return self._store.arrays() | {name: array for name, array in pending.items() if array is not None}

    def every_array(self) -> list[mx.array]:
        """What ``arrays`` gives, without the names, which take most of its time."""
        store, life = self._store, self._life
        out = [*store.keys.arrays().values(), *store.values.arrays().values()]
        out += store.row_aux.values()
        out += store.aux.values()
        others = (store.positions, store.vacant, store.protected, life.queries, life.sinks)
        out += [array for array in others if array is not None]
        if self._watch.pending is not None:
            out.append(self._watch.pending[1])
        return out

    def describe(self) -> dict[str, Any]:
        """What the receipt says of this layer."""
        return {
            "method": self.method,
            "tokens": self.offset,
            "rows": self._store.live,
            "elements": self.elements,
            "bytes": self.held_bytes(),
            "attention": sorted(path.value for path in self._paths) or [self._mode.value],
            "notes": [*self._recipe.notes, *self.notes, *self._remarks(), *sorted(self._kernels.reasons)],
        }

    def _remarks(self) -> list[str]:
        if self._recipe.together > 1 and not joint.linked(self):
            return []
        tensors = (("keys", self._store.keys), ("values", self._store.values))
        return [f"{name}: {text}" for name, stream in tensors for text in stream.remarks()]

    @property
    def _drops(self) -> bool:
        return self._recipe.eviction is not None and self._recipe.eviction.drops

    @property
    def elements(self) -> int:
        """Numbers that an uncompressed cache would hold for the same tokens."""
        if self.empty():
            return 0
        keys, values = self._store.keys, self._store.values
        return keys.batch * keys.heads * self.offset * (keys.dim + values.dim)

    # -------------------------------------------------------------------------------------------------------- inside

    def _check(self, keys: mx.array, values: mx.array) -> None:
        """Refuse what cannot be taken, before anything changes."""
        k, v = self._store.keys, self._store.values
        check_rows(keys, values, (k.batch, k.heads, k.dim, v.dim) if self._store.n else None)
        limits = [self._recipe.most] if self._recipe.most is not None else []
        if self._config.capacity is not None and not self._drops:
            limits.append(("capacity", self._config.capacity))
        for field, most in limits:
            if self.offset + keys.shape[2] > most:
                raise CacheStateError(
                    f"{field}={most} tokens; {self.offset} are held and {keys.shape[2]} more came. "
                    f"Raise {field}, or choose a method that drops tokens."
                )
        self._watch.check()

    def _fit_geometry(self, keys: mx.array, values: mx.array) -> None:
        """Rebuild the recipe where the tensors differ from what the configuration promised."""
        layer = dataclasses.replace(
            self._layer, head_dim=keys.shape[3], value_dim=values.shape[3], kv_heads=keys.shape[1]
        )
        if layer != self._layer:
            protected = self._store.protected  # of these very rows, by a layer before
            self._build(layer)
            self._store.protected = protected

    def _note_wait(self, rows: int) -> None:
        """Say so where more tokens than the method allows wait, as floats, for the last layer of the group."""
        if (most := self._recipe.most_raw) is not None and rows > most[1]:
            field, limit = most
            text = f"more tokens than {field}={limit} came at once and waited as floats for the last layer of a group"
            self.notes = tuple(dict.fromkeys((*self.notes, text)))

    def use_arrays(self) -> None:
        """Nobody called ``attend`` for the last update: the model has attention code of its own."""
        if self._life.needs_queries:
            raise QuantizerConfigError(
                f"method={self.method!r} needs the model's queries (or keeps different numbers of rows per head), but "
                "this model's attention does not go through mlx_lm's shared attention function. Choose a method that "
                "needs no queries."
            )
        self._mode = Mode.ARRAY

    def _issue(self, arrays: tuple[mx.array, mx.array] | None) -> tuple[Any, Any]:
        """Handles where attention comes back to us; arrays (``arrays``, or decoded) where it does not or may not."""
        self._issued = None
        if self._mode is Mode.HANDLE:
            k, v = self._store.keys, self._store.values
            shape = (k.batch, k.heads, self.offset)
            return KVHandle(self, "k", (*shape, k.dim), k.dtype), KVHandle(self, "v", (*shape, v.dim), v.dtype)
        keys, values = mx.depends(list(arrays or self.materialize()), list(self.arrays().values()))
        ragged = self._store.holes and not self._store.dead  # dropped rows are not among the arrays
        if ragged and self._mode is Mode.ARRAY:  # while it learns, attention may still come back
            raise CacheStateError(
                "the sequences in this cache keep different numbers of rows, which this model's own attention code "
                "cannot be told. Run them one by one."
            )
        issued = keys, values
        if self._mode is Mode.LEARN:
            self._issued = issued
        return issued

    def _key_view(self) -> entry.KeyView | None:
        """How keys must be changed before attention sees them, None for not at all."""
        ev = self._recipe.eviction
        return None if ev is None else ev.key_view(self.offset - self._store.live)


# mlx_lm's load_prompt_cache and CacheList look classes up by name in their own module.
if hasattr(mlx_cache, CompressedKVCache.__name__):
    raise ImportError("mlx_lm has a cache class called CompressedKVCache; this package must be renamed to match")
setattr(mlx_cache, CompressedKVCache.__name__, CompressedKVCache)
