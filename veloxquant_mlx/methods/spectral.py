"""SpectralQuant: principal axes of keys and values, most bits for the leading ones, a sketch of the residual.

Source: Gopinath et al., "3% Is All You Need" (SpectralQuant), 2026, a preprint of unknown status without arXiv number,
whose own claims file blocks several of its headline claims.

[design] Axes are those of keys as the cache gets them, after RoPE, so that the query is turned once per step; the
source's are of keys before RoPE, and those need a rotation of every decoded key. The bits of the leading axes, which
the source shares by a proxy, are shared by the errors of the levels in use, equally for all heads of a layer. All gain
comes from that sharing: equal bits on principal axes are no better than on random ones.

Axes belong to a model: make them once with ``veloxquant calibrate --method spectral`` and pass them as ``store``.
Without them they are those of the prompt, when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..codecs.allocation import water_filled
from ..codecs.base import ALL
from ..codecs.principal import Allocate, SpectralLevels
from ..codecs.sketch import SignSketch, projections
from ..core.types import Recipe, Stream
from ._axes import ROWS_PER_AXIS, origin, stored_axes
from ._method import FLAG, MethodInfo, Valid, bits_of, ints, option, optional, refuse
from ._two_stream import KEYS, SKETCH, VALUES

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

WIDTHS = tuple(range(1, 9))


@dataclass
class SpectralQuantOptions:
    """Options of ``spectral``."""

    spectral_key_d_eff: int = option(4, "leading key directions", ints(1))
    spectral_val_d_eff: int = option(50, "leading value directions", ints(1))
    spectral_apply_qjl: bool = option(True, "add a sign sketch of the residual to the keys", FLAG)
    spectral_model_name: str = option(
        "model",
        "name under which fitted bases are stored",
        Valid("a non-empty str", lambda v: isinstance(v, str) and v != ""),
    )


INFO = MethodInfo(
    name="spectral",
    title="SpectralQuant",
    family="rotation",
    paper="3% Is All You Need",
    needs="calibration",
    standalone=True,
    reads={"bit_width_inlier": ints(1, 8), "jl_dim": optional(ints(1)), "n_calib_tokens": optional(ints(1))},
    options=SpectralQuantOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.spectral_key_d_eff > config.head_dim:
        valid = f"an int <= head_dim = {config.head_dim}"
        refuse("spectral_key_d_eff", config.spectral_key_d_eff, valid, "There are no more directions than numbers.")


def shared(d_eff: int, pool: int, bits: int) -> Allocate:
    """``pool`` bits for the first ``d_eff`` axes, where they help most, and ``bits`` for each of the others."""

    def allocate(errors: np.ndarray) -> np.ndarray:
        rest = np.full(len(errors) - d_eff, bits, np.uint8)
        return np.concatenate([water_filled(errors[:d_eff], pool), rest])

    return allocate


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Every token is encoded on its own; the sketch of the leading key axes makes up for one bit of each."""
    bits, calib, seed = bits_of(config), config.n_calib_tokens, config.seed
    stored = stored_axes(config, layer, config.spectral_model_name)

    def stream(part: str, dim: int, d_eff: int, pool: int, tag: int, sketch: SignSketch | None = None) -> Stream:
        allocate, least = shared(d_eff, pool, bits), calib or ROWS_PER_AXIS * dim
        codec = SpectralLevels(
            dim, allocate, WIDTHS, fit_rows=calib or ALL, least=least, seed=seed, tag=tag, sketch=sketch
        )
        if stored is not None:
            return Stream(codec.bind(codec.arrange(stored[part])))
        return Stream(codec, fit_rows=least)

    keys_d = min(config.spectral_key_d_eff, layer.head_dim)
    values_d = min(config.spectral_val_d_eff, layer.value_dim)
    sketch, pool = None, (bits + 1) * keys_d
    if config.spectral_apply_qjl:
        sketch, pool = SignSketch(projections(keys_d, config.jl_dim or keys_d, seed, SKETCH)), bits * keys_d
    notes = [origin(config, layer, stored is not None, "a random rotation and equal bits", calib)]
    if values_d < config.spectral_val_d_eff:
        notes.append(f"spectral_val_d_eff={config.spectral_val_d_eff}: values have {values_d} directions")
    return Recipe(
        keys=stream("k", layer.head_dim, keys_d, pool, KEYS, sketch),
        values=stream("v", layer.value_dim, values_d, bits * values_d, VALUES),
        deferred=stored is None and calib is None,
        notes=tuple(notes),
        from_store=stored is not None,
    )
