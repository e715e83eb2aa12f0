"""The seam: the only code that touches the attention function of mlx_lm (and of mlx_vlm, where it is imported).

A model module does ``from .base import scaled_dot_product_attention`` and looks the name up in its globals at call
time. ``install`` rebinds these names to a dispatcher that acts only on what one of our caches handed out itself, and
forwards every other call untouched. A cache that is read by a model without the seam is never silently wrong: a
``KVHandle`` makes MLX raise TypeError, and dense arrays are what the model would use anyway.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..core.exceptions import CacheInputError

_NAME = "scaled_dot_product_attention"
_BASES = ("mlx_lm.models.base", "mlx_vlm.models.base")
_PACKAGES = ("mlx_lm.", "mlx_vlm.")

_lock = threading.RLock()
_dispatchers: dict[Callable[..., mx.array], Callable[..., mx.array]] = {}  # original -> ours
# Functions of model code outside sys.modules: the way back to their globals without keeping them alive.
_anchors: weakref.WeakSet[FunctionType] = weakref.WeakSet()


class Attends(Protocol):
    """What the seam asks of a cache. ``_issued`` is the pair of arrays of the last update, None once handles go out."""

    shared: bool
    _issued: tuple[mx.array, mx.array] | None

    def attend(
        self, queries: mx.array, *, scale: float, mask: mx.array | str | None, sinks: mx.array | None
    ) -> mx.array: ...

    def materialize(self) -> tuple[mx.array, mx.array]: ...


class KVHandle:
    """Stands for the keys (``which="k"``) or values (``"v"``) that ``owner`` holds, without decoding them.

    ``shape`` is the dense ``(B, H, S, D)`` with S = logical length after the update. Whatever Python code of a model
    does beyond reading shape and dtype decodes into a real array.
    """

    __slots__ = ("dtype", "owner", "shape", "which")

    def __init__(self, owner: Attends, which: str, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self.owner, self.which, self.shape, self.dtype = owner, which, tuple(shape), dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def astype(self, dtype: mx.Dtype, stream: Any = None) -> KVHandle:
        """A handle that decodes to ``dtype`` (phi and phixtral cast values before attention)."""
        return self if dtype == self.dtype else KVHandle(self.owner, self.which, self.shape, dtype)

    def materialize(self) -> mx.array:
        """The decoded array, in this handle's dtype."""
        return self.owner.materialize()["kv".index(self.which)].astype(self.dtype)

    __mlx_array__ = materialize

    def __getattr__(self, name: str) -> Any:
        # Only names that an array has: a probing hasattr(keys, "...") must not decode a whole history.
        if name.startswith("__") or not hasattr(mx.array, name):
            raise AttributeError(f"KVHandle has no attribute {name!r}")
        return getattr(self.materialize(), name)

    def __getitem__(self, index: Any) -> mx.array:
        return self.materialize()[index]

    def __matmul__(self, other: mx.array) -> mx.array:
        return self.materialize() @ other

    def __mul__(self, other: Any) -> mx.array:
        return self.materialize() * other

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"KVHandle({type(self.owner).__name__}, {self.which!r}, {self.shape}, {self.dtype})"


def _arguments(
    cache: Any, scale: float, mask: mx.array | str | None, sinks: mx.array | None = None
) -> tuple[Any, float, mx.array | str | None, mx.array | None]:
    """The signature of the original after (queries, keys, values); some models pass part of it by position."""
    return cache, scale, mask, sinks


def _owner(keys: Any, values: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache that issued exactly this pair, or None for a call that is none of our business."""
    if type(keys) is KVHandle or type(values) is KVHandle:
        owner = getattr(keys, "owner", None)
        if owner is None or getattr(values, "owner", None) is not owner:
            raise CacheInputError("keys and values come from different caches; pass the pair of one update_and_fetch")
        return owner
    cache = args[0] if args else kwargs.get("cache")
    # Identity of both arrays: latent attention hands over `keys = values = latent`, which no cache issued.
    issued = getattr(cache, "_issued", None)
    return cache if issued is not None and keys is issued[0] and values is issued[1] else None


def _dispatcher(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """The dispatcher around ``original``: one per distinct original, so that other packages' patches stay chained."""
    if original in _dispatchers:
        return _dispatchers[original]

    def scaled_dot_product_attention(queries: mx.array, keys: Any, values: Any, *args: Any, **kwargs: Any) -> mx.array:
        owner = _owner(keys, values, args, kwargs)
        if owner is None:
            return original(queries, keys, values, *args, **kwargs)
        cache, scale, mask, sinks = _arguments(*args, **kwargs)
        if cache is not owner:
            owner.shared = True  # another layer reads these rows too: they must not change before its turn
        return owner.attend(queries, scale=scale, mask=mask, sinks=sinks)

    scaled_dot_product_attention.__wrapped__ = original  # type: ignore[attr-defined]
    _dispatchers[original] = scaled_dot_product_attention
    return scaled_dot_product_attention


def _is_ours(value: Any) -> bool:
    return isinstance(value, FunctionType) and _dispatchers.get(getattr(value, "__wrapped__", None)) is value  # type: ignore[arg-type]


def _library_globals() -> Iterator[dict[str, Any]]:
    """Namespaces of mlx_lm and mlx_vlm as imported so far; later imports take the dispatcher from ``base``."""
    importlib.import_module(_BASES[0])
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith(_PACKAGES):
            yield vars(module)


def _functions(model: Any) -> Iterator[FunctionType]:
    """Every function of every class in the model: reaches ``model_file`` code that sys.modules does not know."""
    parts = model.modules() if isinstance(model, nn.Module) else []
    classes = {base for part in parts for base in type(part).__mro__}
    for cls in classes:
        for member in list(vars(cls).values()):
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                yield function


def _targets() -> set[int]:
    """Ids of what ``base`` binds now: the library's own function, or another package's replacement of it."""
    bases = (sys.modules.get(name) for name in _BASES)
    return {id(base.__dict__.get(_NAME)) for base in bases if base is not None}


def _is_original(value: Any, targets: set[int]) -> bool:
    if not callable(value) or _is_ours(value):
        return False
    by_origin = getattr(value, "__name__", None) == _NAME and getattr(value, "__module__", None) in _BASES
    return by_origin or id(value) in targets


def install(model: Any = None) -> int:
    """Let attention calls reach our caches; returns how many names were rebound (0 when all was in place).

    Covers mlx_lm and, where imported, mlx_vlm, whatever they import later, and with ``model`` also the code that its
    classes run in, wherever that was loaded from. Thread-safe; keeps no reference to a model or a cache.
    """
    with _lock:
        functions = list(_functions(model))
        spaces = {id(g): g for g in _library_globals()}
        spaces.update((id(f.__globals__), f.__globals__) for f in functions)
        targets, rebound, touched = _targets(), 0, set()
        for key, space in spaces.items():
            for name, value in list(space.items()):  # by value: aliases are found too
                if _is_original(value, targets):
                    space[name] = _dispatcher(value)
                    rebound += 1
                    touched.add(key)
        _anchors.update(f for f in functions if id(f.__globals__) in touched)
        return rebound


def uninstall() -> int:
    """Give every name that still holds a dispatcher its original back; returns how many names that were."""
    with _lock:
        spaces = {id(g): g for g in _library_globals()}
        spaces.update((id(f.__globals__), f.__globals__) for f in list(_anchors))
        restored = 0
        for space in spaces.values():
            for name, value in list(space.items()):
                if _is_ours(value):
                    space[name] = value.__wrapped__
                    restored += 1
        _anchors.clear()
        _dispatchers.clear()
        return restored


def installed() -> bool:
    """Whether attention of newly imported models reaches our caches."""
    return _is_ours(vars(importlib.import_module(_BASES[0])).get(_NAME))
