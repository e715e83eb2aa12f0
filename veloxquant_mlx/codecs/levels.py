"""Levels of scalar codebooks for coordinates of randomly rotated vectors, in the scale where their rms is one.

Everything is computed from closed-form cell integrals, so no table is shipped: 8 bits take about 10 ms.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from scipy import linalg, special

from ..core.exceptions import QuantizerConfigError
from ..core.types import is_int

if TYPE_CHECKING:
    from ..core.abstractions import ArtifactStore


def _cells(edges: np.ndarray, dim: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mass and first moment of the cells between inner ``edges``, and the density at the edges.

    ``dim=None`` is the standard normal; otherwise ``sqrt(dim)`` times a coordinate of a uniform point of the sphere
    in ``dim`` dimensions.
    """
    if dim is None:
        density = np.exp(-edges * edges / 2) / np.sqrt(2 * np.pi)
        below, above, tail = special.ndtr(edges), special.ndtr(-edges), density
    else:
        u, a = edges / np.sqrt(dim), (dim - 1) / 2
        inside = np.clip(1 - u * u, 1e-300, None)
        front = np.exp(special.gammaln(dim / 2) - special.gammaln(a)) / np.sqrt(np.pi)
        density = front * inside ** (a - 1) / np.sqrt(dim)
        below, above = (special.betainc(a, a, np.clip((1 + side) / 2, 0, 1)) for side in (u, -u))
        tail = np.sqrt(dim) * front / (2 * a) * inside**a
    # The mass of a cell on the right is told from the right end: differences of numbers near one have few digits.
    right = np.append(False, edges > 0)
    mass = np.where(right, -np.diff(above, prepend=1.0, append=0.0), np.diff(below, prepend=0.0, append=1.0))
    moment = -np.diff(tail, prepend=0.0, append=0.0)
    return mass, moment, density


def distortion(levels: np.ndarray, dim: int | None = None) -> float:
    """Mean squared error of rounding a unit-variance coordinate to the nearest of ``levels``."""
    levels = np.sort(np.asarray(levels, dtype=np.float64))
    mass, moment, _ = _cells((levels[1:] + levels[:-1]) / 2, dim)
    return float(1 - 2 * levels @ moment + levels**2 @ mass)


@cache
def _lloyd_max(bits: int, dim: int | None) -> np.ndarray:
    count = 1 << bits
    if dim == 1:  # the sphere is two points
        return np.arange(1 - count, count, 2) / (count - 1)
    # Best point density f^(1/3): the quantiles of a normal stretched by sqrt(3), or of another beta.
    even = (np.arange(count) + 0.5) / count
    if dim is None:
        levels = np.sqrt(3) * special.ndtri(even)
    else:
        levels = np.sqrt(dim) * (2 * special.betaincinv((dim + 3) / 6, (dim + 3) / 6, even) - 1)
    for _ in range(1000):
        edges = (levels[1:] + levels[:-1]) / 2
        mass, moment, density = _cells(edges, dim)
        # Newton on mass * level = moment; a level moves only its own two edges, so the matrix is tridiagonal.
        pull = density * np.diff(levels) / 4
        diagonal = mass - np.append(pull, 0) - np.append(0, pull)
        bands = np.array([np.append(0, -pull), diagonal, np.append(-pull, 0)])
        update = levels - linalg.solve_banded((1, 1), bands, mass * levels - moment)
        update = (update - update[::-1]) / 2
        inside = np.diff(update).min() > 0 and (dim is None or update[-1] ** 2 < dim)
        if not inside or distortion(update, dim) > distortion(levels, dim) + 1e-15:
            # Too far away for Newton: Lloyd's step never makes it worse.
            update = moment / mass
            update = (update - update[::-1]) / 2
        change, levels = np.abs(update - levels).max(), update
        if change < 1e-12:
            break
    levels.setflags(write=False)
    return levels


def lloyd_max(bits: int, dim: int | None = None) -> np.ndarray:
    """The ``2 ** bits`` levels with the least squared error, ascending (Lloyd 1957, Max 1960).

    For a standard normal coordinate, or for an exact sphere coordinate where ``dim`` is given (TurboQuant, arXiv
    2504.19874). The array is shared and read-only.
    """
    _check(bits, 8)
    if dim is not None and (not is_int(dim) or dim < 1):
        raise QuantizerConfigError(f"dim={dim!r}: sphere levels need a dimension of at least 1, or None")
    return _lloyd_max(bits, dim)


def _fit_stages(first: np.ndarray, second: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    count, error = first.size, np.inf
    for _ in range(400):
        sums = (first[:, None] + second[None, :]).reshape(-1)
        order = np.argsort(sums, kind="stable")
        mass, moment = np.empty_like(sums), np.empty_like(sums)
        mass[order], moment[order], _ = _cells((sums[order][1:] + sums[order][:-1]) / 2, None)
        last, error = error, float(1 - 2 * sums @ moment + sums**2 @ mass)
        if last - error < 1e-8 * error:
            break
        # Given the cells, both stages solve one least-squares problem (up to a constant that may move between them).
        mass, moment = mass.reshape(count, count), moment.reshape(count, count)
        normal = np.block([[np.diag(mass.sum(1)), mass], [mass.T, np.diag(mass.sum(0))]])
        solution = np.linalg.lstsq(normal, np.append(moment.sum(1), moment.sum(0)), rcond=None)[0]
        first, second = (np.sort(stage - stage[::-1]) / 2 for stage in (solution[:count], solution[count:]))
    return error, first, second


@cache
def _residual_levels(bits: int) -> tuple[np.ndarray, np.ndarray]:
    single = _lloyd_max(bits, None)
    # Stages that overlap are better than the greedy start leads to, so start from a wider second stage.
    wider = (1.2, 1.4)
    greedy = np.sqrt(distortion(single)) * single
    _, first, second = min((_fit_stages(single, width * greedy) for width in wider), key=lambda fit: fit[0])
    first.setflags(write=False)
    second.setflags(write=False)
    return first, second


def residual_levels(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Two stages of ``2 ** bits`` levels, ascending, whose sums quantise a standard normal jointly best.

    Found by alternating between cells and least squares. No paper is known for this codebook.
    """
    _check(bits, 4)
    return _residual_levels(bits)


def _check(bits: int, most: int) -> None:
    if not is_int(bits) or not 1 <= bits <= most:
        raise QuantizerConfigError(f"bits={bits!r}: must be an int from 1 to {most}. Choose a width in that range.")


def kept(levels: np.ndarray, distribution: str, bits: int, dim: int, store: ArtifactStore | None) -> np.ndarray:
    """``levels``, or those that ``store`` keeps under (distribution, bits, dim); they are saved where there are none.

    Raises QuantizerConfigError for a codebook of another shape or with values that are not finite.
    """
    if store is None:
        return levels
    if not store.exists("codebook", distribution=distribution, b=bits, d=dim):
        store.save_codebook(mx.array(levels.astype(np.float32)), distribution, bits, dim)
    found = np.array(store.load_codebook(distribution, bits, dim), dtype=np.float32)
    if found.shape != levels.shape or not np.isfinite(found).all():
        raise QuantizerConfigError(
            f"store: the codebook kept for {distribution!r}, b={bits}, d={dim} has shape {found.shape}; it must be "
            f"{levels.shape} finite numbers. Remove it from the store; it is then made again."
        )
    return found
