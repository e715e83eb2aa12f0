"""What a layer's attention does to the residual stream, seen while a prompt runs.

``watch`` wraps ``__call__`` of a decoder block's class, once. Where a call brings a cache that ``listens`` (and for no
other call) the block runs with an ear on its attention, and the cosine between the hidden state that came in and the
same with the attention's branch added is noted in the cache.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..attention.forward import Parameter, wrap
from ..core.exceptions import QuantizerConfigError

if TYPE_CHECKING:
    from ..cache.layer import CompressedKVCache

# Note of a layer in ``store.aux``: float32 sum over all tokens but the newest, the newest, and how many tokens.
COSINES = "cosines"


class Branch(NamedTuple):
    """Where a block's attention is, and the norm that its output goes through before it is added (None: no norm)."""

    attention: str
    norm: str | None


_branches: weakref.WeakKeyDictionary[type, Branch] = weakref.WeakKeyDictionary()
_checked: dict[int, weakref.ref[Any]] = {}  # id(block): modules are dicts, so they cannot be keys


class _Ear:
    """A part of a block that remembers what it returned last."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.heard: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.part(*args, **kwargs)
        self.heard = out[0] if isinstance(out, tuple) else out
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


def watch(block: Any, attention: Any, width: int | None, listens: Callable[[CompressedKVCache], bool]) -> None:
    """Note what the ``attention`` of ``block`` adds to hidden states of ``width``, for caches that ``listens`` takes.

    How it is added is found out by running the block on a few random tokens. Raises QuantizerConfigError where that
    cannot be told.
    """
    known = _checked.get(id(block))
    if known is None or known() is not block:
        branch, key = _branch(block, attention, width), id(block)
        if _branches.setdefault(type(block), branch) != branch:
            raise _unwatchable(block, "blocks of one class add their attention in different ways")
        _checked[key] = weakref.ref(block, lambda _: _checked.pop(key, None))
    wrap(type(block), lambda original: _watched(original, listens), "cosines")


def cosines(x: mx.array, r: mx.array) -> mx.array:
    """Cosine ``(B, S)`` float32 between ``x`` and ``x + r``, both ``(B, S, E)``."""
    x = x.astype(mx.float32)
    y = x + r.astype(mx.float32)
    return (x * y).sum(-1) * mx.rsqrt((x * x).sum(-1) * (y * y).sum(-1))


def note(cache: CompressedKVCache, cosine: mx.array) -> mx.array:
    """Add the cosines ``(B, S)`` of new tokens to what ``cache`` remembers; the note, to be computed with the layer."""
    per_token = cosine.mean(axis=0)
    last, new = per_token[-1], per_token[:-1].sum()
    old = cache.store.aux.get(COSINES)
    before, count = (mx.array(0.0), mx.array(0.0)) if old is None else (old[0] + old[1], old[2])
    cache.store.aux[COSINES] = mx.stack([before + new, last, count + cosine.shape[1]])
    return cache.store.aux[COSINES]


def _watched(original: Callable, listens: Callable[[CompressedKVCache], bool]) -> Callable:
    from ..cache.batch import CompressedBatchCache
    from ..cache.layer import CompressedKVCache

    first, parameter = (
        Parameter(tuple(list(inspect.signature(original).parameters)[1:2]), 0),
        Parameter.of(original, "cache"),
    )

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = parameter.value(args, kwargs)
        rows = cache.rows if isinstance(cache, CompressedBatchCache) else [cache]
        if not any(isinstance(row, CompressedKVCache) and listens(row) for row in rows):
            return original(self, *args, **kwargs)
        out, x, r = _heard(original, self, _branches[type(self)], first.value(args, kwargs), args, kwargs)
        cosine = cosines(x, r)
        parts = cache.plan if isinstance(cache, CompressedBatchCache) else [slice(0, x.shape[1])]
        notes = [
            note(row, cosine[i : i + 1, part] if len(rows) > 1 else cosine[:, part])
            for i, (row, part) in enumerate(zip(rows, parts, strict=True))
            if part.start < part.stop and listens(row)
        ]
        if isinstance(out, tuple):
            return mx.depends([out[0]], notes)[0], *out[1:]
        return mx.depends([out], notes)[0]

    return __call__


def _heard(
    original: Callable, block: Any, branch: Branch, x: mx.array, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, mx.array, mx.array]:
    """What ``block`` returns, the hidden states ``x`` that came in and what its attention adds to them."""
    ear = _Ear(block[branch.attention])
    out = original(_with(block, {branch.attention: ear}), *args, **kwargs)
    return out, x, ear.heard if branch.norm is None else block[branch.norm](ear.heard)


def _with(block: Any, parts: dict[str, Any]) -> Any:
    """A copy of ``block`` with some ``parts`` replaced; the rest is shared, the block itself stays as it is."""
    copy = dict.__new__(type(block))
    copy.__dict__.update(block.__dict__)
    dict.update(copy, block)
    dict.update(copy, parts)
    return copy


def _branch(block: Any, attention: Any, width: int | None) -> Branch:
    """Find out how ``block`` adds its attention: with every other part silenced, hidden states change by that alone."""
    parts = block.items() if isinstance(block, nn.Module) else []
    children = {n: part for n, part in parts if isinstance(part, nn.Module)}
    name = next((n for n, part in children.items() if part is attention), None)
    if name is None or width is None:
        raise _unwatchable(block, "its attention or its width is not where other models have it")
    norms = [n for n, part in children.items() if "norm" in (n + type(part).__name__).lower()]
    quiet = {n: _silence for n in children if n != name and n not in norms}
    ear, original = _Ear(attention), inspect.unwrap(type(block).__call__)
    x = mx.random.normal((1, 4, width), key=mx.random.key(0)).astype(_float_dtype(block))
    # Sums of two rounded numbers, rounded; their factor is found in float32.
    close = max(4 * mx.finfo(x.dtype).eps, 1e-5)
    try:
        out = original(_with(block, quiet | {name: ear}), x, **_nothing(original))
        out = out[0] if isinstance(out, tuple) else out
        for norm in (None, *norms):
            added = ear.heard if norm is None else block[norm](ear.heard)
            if added.shape == x.shape == out.shape and _proportional(out, x + added, close):
                return Branch(name, norm)
    except Exception as error:  # a model's own code may raise anything; the caller is told what
        raise _unwatchable(block, f"it raised {type(error).__name__}: {error}") from error
    raise _unwatchable(block, "it does more than add its attention, or a norm of it, to the hidden state")


def _proportional(out: mx.array, y: mx.array, close: float) -> bool:
    """Whether ``out`` is ``y`` times one number (some blocks scale all that they return)."""
    out, y = out.astype(mx.float32), y.astype(mx.float32)
    factor = (out * y).sum() / (y * y).sum()
    return bool(mx.allclose(out, factor * y, rtol=close, atol=close))


def _silence(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
    return mx.zeros_like(x)


def _nothing(function: Callable) -> dict[str, Any]:
    """None for every parameter after the hidden states that must be given."""
    parameters = list(inspect.signature(function).parameters.values())[2:]
    return {p.name: None for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}


def _float_dtype(block: nn.Module) -> mx.Dtype:
    arrays = (a for part in block.modules() for a in part.values() if isinstance(a, mx.array))
    return next((a.dtype for a in arrays if mx.issubdtype(a.dtype, mx.floating)), mx.float32)


def _unwatchable(block: Any, why: str) -> QuantizerConfigError:
    return QuantizerConfigError(
        f"squeeze needs the residual stream, and the blocks of this model ({type(block).__name__}) do not show it: "
        f"{why}. Choose 'h2o', or set squeeze_resolved_budget."
    )
