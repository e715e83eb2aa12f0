"""SpectralQuant: principal axes of keys and values, most bits for the leading ones, a sketch of the residual.

Source: Gopinath et al., "3% Is All You Need" (SpectralQuant), 2026, a preprint of unknown status without arXiv number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import FLAG, MethodInfo, Valid, ints, option, optional, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


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
    reads={"bit_width_inlier": ints(1, 8), "n_calib_tokens": optional(ints(1))},
    options=SpectralQuantOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.spectral_key_d_eff > config.head_dim:
        valid = f"an int <= head_dim = {config.head_dim}"
        refuse("spectral_key_d_eff", config.spectral_key_d_eff, valid, "There are no more directions than numbers.")
