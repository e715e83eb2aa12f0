"""Kernels are tried before they are used: on a few random rows, against decoded rows, on this very device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from ...core.types import Recipe
from . import decode
from .sides import Side, sides

if TYPE_CHECKING:
    from ...cache.store import Store

# Largest difference, relative to the largest result. Half precision gives about 1e-3; a wrong reader about 1.
LIMIT = 0.02
ROWS = 640  # packed rows to try on: enough for the tensor cores to take part

_verdicts: dict[tuple, Verdict] = {}


class Verdict(NamedTuple):
    """Whether a kernel ``works``, also with ``half`` precision products, and what was wrong."""

    works: bool
    half: bool
    reason: str | None = None


def verdict(store: Store, keys: Side, values: Side, q: mx.array, half: bool) -> Verdict:
    """Whether kernels attend to rows packed like those of ``store`` as to decoded ones; waits for the device once."""
    rows = q.shape[1] * q.shape[2] // store.keys.heads
    kind = (keys.form, values.form, q.dtype, store.keys.dtype, store.keys.heads, rows, q.shape[2], half, q.shape[-1])
    known = _verdicts.get(kind)
    if known is None:
        known = _verdicts[kind] = _tried(store, q, half)
    return known


def _tried(store: Store, q: mx.array, half: bool) -> Verdict:
    reason = _difference(store, q, half)
    if reason is None:
        return Verdict(True, half)
    if half:
        plain = _difference(store, q, False)
        if plain is None:
            return Verdict(True, False, f"no tensor cores: {reason}")
        reason = plain
    return Verdict(False, False, reason)


def _difference(store: Store, q: mx.array, half: bool) -> str | None:
    """What is wrong with the kernel, None where nothing is."""
    from .. import entry  # which imports this package

    small = _small(store)
    found = sides(small, q.shape[-1])
    if isinstance(found, str):
        return f"no kernel that could be tried ({found})"
    x = mx.random.normal(q[: small.keys.batch].shape, key=mx.random.key(2)).astype(q.dtype)
    scale = q.shape[-1] ** -0.5
    wanted = entry.decoded(small, x, scale, "causal", None)[0].astype(mx.float32)
    try:
        got = decode.attention(*found, x, scale, "causal", None, small.n, half).astype(mx.float32)
        error = float(mx.abs(got - wanted).max() / mx.abs(wanted).max())
    except (RuntimeError, ValueError) as failure:
        return f"the kernel cannot be run here: {str(failure).splitlines()[0][:200]}"
    return None if error <= LIMIT else f"the kernel is wrong on this device (relative error {error:.1e})"


def _small(store: Store) -> Store:
    """A store like ``store`` with few random rows, the last of them those of the call."""
    specs = (store.keys.spec, store.values.spec)
    small, fitted = type(store)(Recipe(*specs)), False
    for mine, other in ((small.keys, store.keys), (small.values, store.values)):
        if other.packed is not None and other.packed.fitted:
            mine.learn(other.packed.fitted)
            fitted = True
    # What was fitted on sequences is different for each.
    lead = (store.keys.batch if fitted else 1, store.keys.heads)
    n = ROWS + max(spec.sinks + spec.window + min(spec.chunk, ROWS) for spec in specs)
    dims = (store.keys.dim, store.values.dim)
    keys, values = (mx.random.normal((*lead, n + 8, d), key=mx.random.key(d)).astype(store.keys.dtype) for d in dims)
    small.append(keys[:, :, :n], values[:, :, :n], 0)
    small.seal(ends=True)
    small.append(keys[:, :, n:], values[:, :, n:], n)
    return small
