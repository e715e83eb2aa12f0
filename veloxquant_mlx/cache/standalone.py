"""The standalone methods as the library's own ``KVCache``: one head, fed one token at a time."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import mlx.core as mx

from ..core.abstractions import KVCache
from ..core.exceptions import CacheInputError, CacheStateError
from ..core.types import LayerInfo
from .layer import CompressedKVCache
from .sliding_window_cache import SlidingWindowKVCache

if TYPE_CHECKING:
    from .base import KVCacheConfig


def standalone(config: KVCacheConfig) -> KVCache:
    """The cache that ``config`` (checked) asks for, behind a sliding window where it has one."""
    cache = StandaloneKVCache(config)
    return cache if config.sliding_window is None else SlidingWindowKVCache(cache, config.sliding_window)


class StandaloneKVCache(KVCache):
    """A serving cache of one sequence and one head, ``head_dim`` numbers per key and per value.

    The same codecs and the same numbers as ``for_model(..., serve_standalone=True)``: the newest token is exact until
    the next one comes, so that reading changes nothing. Scores are divided by ``sqrt(head_dim)``. The key of a token
    may come before or after its value; it counts once both are there.

    Raises CacheInputError for anything but a vector of ``head_dim`` numbers, CacheStateError for a full ``capacity``
    (at the append that completes the token too many, which is not kept) and for attention over nothing or over half a
    token.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self._config = config
        self._keys: list[mx.array] = []  # waiting for their values
        self._values: list[mx.array] = []
        self._cache = self._new()

    def _new(self) -> CompressedKVCache:
        d = self._config.head_dim
        cache = CompressedKVCache(self._config, LayerInfo(head_dim=d, value_dim=d, kv_heads=1))
        cache.shared = True  # attention leaves the newest token as it is: the next update settles it
        return cache

    @property
    def config(self) -> KVCacheConfig:
        """A copy of the configuration."""
        return copy.deepcopy(self._config)

    def append_key(self, k: mx.array) -> None:
        self._keys.append(self._row(k, "key"))
        self._complete()

    def append_value(self, v: mx.array) -> None:
        self._values.append(self._row(v, "value"))
        self._complete()

    def attend(self, q: mx.array) -> mx.array:
        q = self._row(q, "query")
        if self._keys or self._values:
            done, more = len(self), len(self._keys) - len(self._values)
            raise CacheStateError(
                f"{done + max(more, 0)} keys but {done + max(-more, 0)} values were appended; append both of a token "
                "before the cache is read"
            )
        if not len(self):
            raise CacheStateError("attend on an empty cache; append a key and a value first")
        return self._cache.attend(q, scale=self._config.head_dim**-0.5)[0, 0, 0]

    def memory_bytes(self) -> int:
        """Bytes of every array held: codes, exact rows, and the method's own matrices and codebooks."""
        return self._cache.nbytes + sum(row.nbytes for row in (*self._keys, *self._values))

    def reset(self) -> None:
        """Forget every token. What was fitted on the first ones stays."""
        old, self._cache = self._cache.store, self._new()
        self._keys, self._values = [], []
        for mine, theirs in ((self._cache.store.keys, old.keys), (self._cache.store.values, old.values)):
            if mine.packed is not None and theirs.packed is not None:
                mine.packed.fit(theirs.packed.fitted)

    def __len__(self) -> int:
        return self._cache.offset

    def _row(self, x: mx.array, what: str) -> mx.array:
        """``x`` as ``(1, 1, 1, D)``, in a buffer of its own."""
        d = self._config.head_dim
        x = mx.array(x)
        if x.shape != (d,) or not mx.issubdtype(x.dtype, mx.floating):
            raise CacheInputError(f"a {what} of shape {x.shape}, {x.dtype}, came; valid: ({d},) of a float dtype")
        return x[None, None, None]

    def _complete(self) -> None:
        if self._keys and self._values:
            self._cache.append(self._keys.pop(0), self._values.pop(0))
