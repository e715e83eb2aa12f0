"""A sliding window around any standalone cache."""

from __future__ import annotations

from collections import deque

import mlx.core as mx

from ..core.abstractions import KVCache
from ..core.exceptions import CacheStateError, QuantizerConfigError
from ..core.types import is_int


class SlidingWindowKVCache(KVCache):
    """Shows the last ``window_size`` tokens of ``inner``, as if it had never seen an older one.

    A compressed cache cannot forget its first token, so the window's rows are kept as they came and fed again to the
    reset ``inner`` when it is read after a token has left: a read costs up to ``window_size`` appends. Those rows are
    not in ``memory_bytes()``, which equals that of a fresh cache of the window; ``window_bytes`` counts them.
    """

    def __init__(self, inner: KVCache, window_size: int) -> None:
        if not is_int(window_size) or window_size < 1:
            raise QuantizerConfigError(
                f"window_size={window_size!r} cannot be used: it must be an int >= 1. Give the number of newest tokens "
                "to keep."
            )
        if type(inner).reset is KVCache.reset:
            raise QuantizerConfigError(
                f"inner={type(inner).__name__} cannot be used: it must implement reset(), which forgets its tokens. "
                "Implement it, or use the cache without a window."
            )
        inner.reset()
        self._inner = inner
        self._keys: deque[mx.array] = deque(maxlen=window_size)
        self._values: deque[mx.array] = deque(maxlen=window_size)
        self._seen = [0, 0]  # keys, values
        self._stale = False

    def append_key(self, k: mx.array) -> None:
        self._stale = self._stale or len(self._keys) == self._keys.maxlen
        if not self._stale:
            self._inner.append_key(k)
        self._keys.append(mx.array(k))
        self._seen[0] += 1

    def append_value(self, v: mx.array) -> None:
        if not self._stale:
            self._inner.append_value(v)
        self._values.append(mx.array(v))
        self._seen[1] += 1

    def attend(self, q: mx.array) -> mx.array:
        return self._window().attend(q)

    def memory_bytes(self) -> int:
        return self._window().memory_bytes()

    @property
    def window_bytes(self) -> int:
        """Bytes of the rows that are kept to feed ``inner`` again."""
        return sum(row.nbytes for row in (*self._keys, *self._values))

    def reset(self) -> None:
        self._inner.reset()
        self._keys.clear()
        self._values.clear()
        self._seen = [0, 0]
        self._stale = False

    def __len__(self) -> int:
        return len(self._values)

    def _window(self) -> KVCache:
        """The inner cache, holding exactly the tokens of the window."""
        if self._stale:
            if self._seen[0] != self._seen[1]:
                raise CacheStateError(
                    f"{self._seen[0]} keys but {self._seen[1]} values were appended; append both of a token before "
                    "the cache is read"
                )
            self._inner.reset()
            for k, v in zip(self._keys, self._values, strict=True):
                self._inner.append(k, v)
            self._stale = False
        return self._inner
