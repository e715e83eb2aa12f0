"""Orthogonal axes that rows of a head lie along: eigenvectors of their Gram matrix, largest first."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

# Rows that axes are found on at most; of more rows every second, third, … is taken.
MOST_ROWS = 8192
# More channels than this have no whole Gram matrix decomposed: 2,048 take ten seconds and more.
MOST_CHANNELS = 1024
# Of the search among more channels: where it starts, axes beyond those wanted, and power steps.
SEED, SPARE, STEPS = 1503, 8, 2
TINY = 1e-18


def sampled(x: mx.array) -> mx.array:
    """At most ``MOST_ROWS`` rows of ``x`` ``(B, H, n, D)``, evenly spaced, in float32."""
    step = -(-x.shape[2] // MOST_ROWS)
    return x[:, :, ::step].astype(mx.float32)


def row_rms(x: mx.array) -> mx.array:
    """Root of the mean square of every row ``(B, H, n, D)``: ``(B, H, n, 1)``."""
    return mx.sqrt(mx.square(x).mean(-1, keepdims=True))


def principal_axes(x: mx.array) -> tuple[mx.array, mx.array]:
    """Axes ``(B, H, D, D)``, one per column, and their energies ``(B, H, D)`` in ``x`` ``(B, H, n, D)``, descending.

    Energies are squared singular values (nothing is centred).
    """
    return gram_axes(x.swapaxes(-1, -2) @ x)


def gram_axes(gram: mx.array) -> tuple[mx.array, mx.array]:
    """Axes and energies as of ``principal_axes``, from the Gram matrix ``(B, H, D, D)`` of the rows.

    The largest entry of every axis is positive, so that axes do not depend on the machine's sign. Decomposed in float32
    on the CPU, which the GPU does not wait for. Energies below 0 count as 0 and stay last.
    """
    gram = mx.where(mx.isfinite(gram), gram, 0.0)  # LAPACK may never return; rows that are not finite raise elsewhere
    energy, axes = mx.linalg.eigh(gram, stream=mx.cpu)  # type: ignore[arg-type]
    energy, axes = mx.maximum(energy[..., ::-1], 0.0), axes[..., ::-1]
    peak = mx.take_along_axis(axes, mx.argmax(mx.abs(axes), axis=-2, keepdims=True), axis=-2)
    return axes * mx.where(peak < 0, -1.0, 1.0), energy


def leading_axes(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The first ``k`` axes ``(B, H, D, k)`` and energies ``(B, H, k)`` of ``principal_axes``.

    Among many channels by a seeded random search (Halko, Martinsson, Tropp, arXiv 0909.4061) with two power steps: the
    energy left out is then that of the best axes, or a few hundredths more where energies fall slowly, and no matrix to
    decompose is larger than ``k + 8``.
    """
    dim = x.shape[-1]
    if dim <= MOST_CHANNELS or k + SPARE >= dim:
        axes, energy = principal_axes(x)
        return axes[..., :k], energy[..., :k]
    found = mx.array(np.random.default_rng(SEED).normal(size=(dim, k + SPARE)).astype(np.float32))
    for _ in range(1 + STEPS):
        found = _orthogonal(x.swapaxes(-1, -2) @ (x @ found), passes=2)
    found = _orthogonal(found, passes=1)
    turn, energy = principal_axes(x @ found)
    return (found @ turn)[..., :k], energy[..., :k]


def _orthogonal(y: mx.array, passes: int) -> mx.array:
    """Orthonormal columns that span those of ``y`` ``(B, H, D, k)``, through the Gram matrix of the columns.

    Each pass brings columns that lie close together apart by three digits.
    """
    for _ in range(passes):
        y = y / mx.maximum(mx.sqrt(mx.square(y).sum(-2, keepdims=True)), TINY)
        axes, energy = principal_axes(y)
        y = (y @ axes) / mx.sqrt(mx.maximum(energy, mx.maximum(1e-6 * energy[..., :1], TINY)))[..., None, :]
    return y
