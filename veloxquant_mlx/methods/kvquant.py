"""KVQuant: levels fitted to the data, keys per channel before RoPE, values per token, sparse outliers kept exact.

Paper: Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization", NeurIPS
2024, arXiv:2401.18079.

[design] The paper fits offline, with gradients as weights. Here the first tokens after the sinks wait in full precision
until there are enough for the fit (``n_calib_tokens``, or 16 per level and at least 256), all with the same weight; the
receipt says so. ``kvquant_group_size`` is the block in which tokens are encoded, so up to a block stays exact. With
``kvquant_refit_interval`` N tokens wait instead, and every N are encoded with tables fitted on themselves, which are
kept with them. The levels start halfway between quantiles and even spacing: see ``codecs.nonuniform.fit_levels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.nonuniform import ChannelLevels, Refitted, TokenLevels
from ..core.types import Recipe, Stream
from ._method import MethodInfo, floats, ints, option, optional, refuse
from ._prerope import before_rope

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

FIT_ROWS, FIT_ROWS_PER_LEVEL = 256, 16
FEWEST = 16  # tokens of a fit: the range of a channel is read from them


@dataclass
class KVQuantOptions:
    """Options of ``kvquant``."""

    kvquant_bits: int = option(3, "bits per number", ints(1, 5))
    kvquant_outlier_fraction: float = option(0.01, "share of numbers stored exactly; 0: none", floats("[0, 0.5)"))
    kvquant_group_size: int = option(32, "tokens packed together", ints(2))
    kvquant_lloyd_iters: int = option(8, "steps of the fit of the levels", ints(1))
    kvquant_refit_interval: int = option(0, "tokens between fits; 0: never again", ints(0))
    kvquant_n_sink: int = option(1, "first tokens that stay exact", ints(0))


INFO = MethodInfo(
    name="kvquant",
    title="KVQuant",
    family="group quantization",
    paper="KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization",
    arxiv="2401.18079",
    venue="NeurIPS 2024",
    needs="rope",
    reads={"n_calib_tokens": optional(ints(1))},
    options=KVQuantOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    interval, group, calib = config.kvquant_refit_interval, config.kvquant_group_size, config.n_calib_tokens
    if interval and (interval < FEWEST or interval % group):
        valid = f"0, or an int >= {FEWEST} that is a multiple of kvquant_group_size = {group}"
        refuse(
            "kvquant_refit_interval", interval, valid, f"Use {max(-(-interval // group), -(-FEWEST // group)) * group}."
        )
    if interval and calib is not None:
        remedy = "Every kvquant_refit_interval tokens are fitted by themselves."
        refuse("n_calib_tokens", calib, "None while kvquant_refit_interval is on", remedy)
    if calib is not None and calib < FEWEST:
        refuse("n_calib_tokens", calib, f"None or an int >= {FEWEST} for kvquant", "The default is None: 256 or more.")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Every token after the sinks is encoded once there is a fit; both tensors alike."""
    bits, interval = config.kvquant_bits, config.kvquant_refit_interval
    fit_rows = interval or config.n_calib_tokens or max(FIT_ROWS, FIT_ROWS_PER_LEVEL << bits)
    fraction, sweeps = config.kvquant_outlier_fraction, config.kvquant_lloyd_iters
    keys = ChannelLevels(bits, dim=layer.head_dim, fraction=fraction, sweeps=sweeps, fit_rows=fit_rows)
    values = TokenLevels(bits, dim=layer.value_dim, fraction=fraction, sweeps=sweeps, fit_rows=fit_rows)
    rotation, notes = before_rope(layer)
    fit = f"levels fitted on every {interval}" if interval else f"levels fitted on the first {fit_rows}"
    chunk, sinks = interval or config.kvquant_group_size, config.kvquant_n_sink
    return Recipe(
        keys=Stream(Refitted(keys, chunk) if interval else keys, chunk=chunk, sinks=sinks, rotation=rotation),
        values=Stream(Refitted(values, chunk) if interval else values, chunk=chunk, sinks=sinks),
        notes=(*notes, f"{fit} tokens of the text itself, without gradients"),
    )
