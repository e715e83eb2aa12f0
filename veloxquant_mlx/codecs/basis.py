"""Orthogonal axes that rows of a head lie along: eigenvectors of their Gram matrix, largest first."""

from __future__ import annotations

import mlx.core as mx

# Rows that axes are found on at most; of more rows every second, third, … is taken.
MOST_ROWS = 8192


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
