"""Rotary positions (RoPE, Su et al., arXiv 2104.09864) of a layer, read off its own module.

A rotation is measured, never copied from a class: feeding unit vectors through the module shows which channels form
a pair and how fast each pair turns, for plain, traditional, partial, linear, Llama-3, YaRN, LongRoPE and proportional
scaling alike. The result holds numpy tables only, so that a cache which owns it keeps no part of a model alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.exceptions import QuantizerConfigError

_TURN = 2 * np.pi
_FAR, _FAR_ANGLE = 2**18, 4096.0  # beyond every trained length; angles up to 4096 are still exact enough in fp32


@dataclass(frozen=True, eq=False)
class Rotation:
    """The bare rotation of one layer: ``y[d] = x[d] cos(p rate[d]) + x[partner[d]] sin(p rate[d])`` at position p.

    ``partner`` (D,) int32 and ``rate`` (D,) float64 in radians per position; channels that stay have rate 0.
    """

    partner: np.ndarray
    rate: np.ndarray

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        """Turn ``x`` (B, H, n, D) on by ``offset`` positions (negative: back); float32 maths, result in x's dtype."""
        angle = self.rate * offset  # float64 on the host: exact at any length, and nothing to wait for
        cos, sin = mx.array(np.cos(angle).astype(np.float32)), mx.array(np.sin(angle).astype(np.float32))
        wide = x.astype(mx.float32)
        return (wide * cos + mx.take(wide, mx.array(self.partner), axis=-1) * sin).astype(x.dtype)

    def turn(self, x: mx.array, positions: mx.array) -> mx.array:
        """Turn row i of ``x`` (B, H, n, D) on by ``positions`` (B | 1, H | 1, n) int32; negative turns back.

        Angles of far positions carry the rounding of float32 (0.006 rad at 100,000); turning there and back is exact
        all the same, since both ways use the same angle.
        """
        turns = mx.abs(positions)[..., None].astype(mx.float32) * mx.array((self.rate / _TURN).astype(np.float32))
        angle = (turns - mx.floor(turns)) * _TURN
        sign = mx.where(positions < 0, -1.0, 1.0)[..., None]
        wide = x.astype(mx.float32)
        turned = wide * mx.cos(angle) + mx.take(wide, mx.array(self.partner), axis=-1) * (mx.sin(angle) * sign)
        return turned.astype(x.dtype)

    def within(self, size: int) -> Rotation:
        """The same rotation of the first channels of vectors of ``size``."""
        more = np.arange(self.rate.size, size, dtype=self.partner.dtype)
        return Rotation(np.concatenate([self.partner, more]), np.pad(self.rate, (0, more.size)))

    def at_end(self) -> Rotation:
        """The same rotation over the last channels instead of the first (keys built as ``[plain | rotated]``)."""
        moved = np.flatnonzero(self.rate)
        shift = self.rate.size - (int(moved.max()) + 1) if moved.size else 0
        return Rotation(((np.roll(self.partner, shift) + shift) % self.rate.size), np.roll(self.rate, shift))


@dataclass(frozen=True)
class UnknownRotation:
    """A layer whose keys turn with the position in a way that could not be read; ``reason`` says what was seen."""

    reason: str


def bare_rotation(rope: Rotation | UnknownRotation | None, x: mx.array, offset: int) -> mx.array:
    """Turn already rotated keys ``x`` (B, H, n, D) on by ``offset`` positions; ``rope`` is ``LayerInfo.rope``.

    Rotations compose, and no magnitude factor (YaRN, LongRoPE) is applied a second time. None means that the layer has
    no positions in its keys: ``x`` comes back as it is, as it does for offset 0. Raises QuantizerConfigError for an
    UnknownRotation.
    """
    if isinstance(rope, UnknownRotation):
        raise QuantizerConfigError(
            f"the keys of this layer cannot be moved to other positions: {rope.reason}. Use a method that keeps the "
            "original positions (for example snapkv or tova), or a model whose attention has a plain rotary module"
        )
    return x if rope is None or offset == 0 else rope(x, offset)


def probe_rotation(module: Any, head_dim: int) -> Rotation:
    """Measure the rotation that ``module(x, offset=)`` applies to vectors of ``head_dim`` channels.

    Raises QuantizerConfigError when the module is no rotation of channel pairs, or turns at a rate that changes with
    the position (dynamic NTK scaling).
    """
    # One position is enough: at a turn of f radians the angle is as exact as the module's own float32 rate.
    first = _response(module, head_dim, 1)
    partner = _partners(first, type(module).__name__)
    turned = partner != np.arange(head_dim)
    rate = np.where(turned, _angle(first, partner), 0.0)
    checked = turned & (np.abs(rate) * _FAR < _FAR_ANGLE)
    error = _angle(_response(module, head_dim, _FAR), partner) - rate * _FAR
    if np.any(np.abs((error + np.pi) % _TURN - np.pi)[checked] > 0.05):
        raise QuantizerConfigError(f"{type(module).__name__} turns at a rate that changes with the position")
    return Rotation(partner.astype(np.int32), rate)


def _response(module: Any, head_dim: int, position: int) -> np.ndarray:
    """Row i: what the module makes of unit vector i at ``position``."""
    with mx.stream(mx.cpu):  # type: ignore[attr-defined]  # a GPU's fast sine is too coarse to measure rates with
        try:
            out = module(mx.eye(head_dim)[None, :, None, :], offset=position)
            return np.array(out.astype(mx.float32))[0, :, 0, :].astype(np.float64)
        except Exception as error:  # a model's own code may raise anything
            raise QuantizerConfigError(
                f"{type(module).__name__} cannot be called as a rotary module, (x, offset=): {error}"
            ) from error


def _partners(response: np.ndarray, name: str) -> np.ndarray:
    size = response.shape[0]
    rest = response - np.diag(np.diag(response))
    partner = np.where(np.any(rest != 0, axis=1), np.argmax(np.abs(rest), axis=1), np.arange(size))
    own, sine = np.diag(response), rest[np.arange(size), partner]
    paired = (
        np.all(np.count_nonzero(rest, axis=1) <= 1)
        and np.array_equal(partner[partner], np.arange(size))
        and np.allclose(own, own[partner], atol=1e-4)
        and np.allclose(sine, -sine[partner], atol=1e-4)
    )
    if not paired:
        raise QuantizerConfigError(f"{name} does not rotate pairs of channels")
    return partner


def _angle(response: np.ndarray, partner: np.ndarray) -> np.ndarray:
    """Angle per output channel in (-pi, pi]; a magnitude factor cancels."""
    return np.arctan2(response[partner, np.arange(partner.size)], np.diag(response))
