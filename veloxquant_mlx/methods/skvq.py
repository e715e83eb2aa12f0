"""SKVQ: groups of channels that are alike, clipped ranges, a sliding window and sinks exact.

Paper: Duanmu et al., "SKVQ: Sliding-window Key and Value Cache Quantization for Large Language Models", COLM 2024,
arXiv:2405.06219. Keys are stored before their rotary position, as in the paper's main setting.

Groups are clusters of channels by their ends in a text, of any size, as in the official code; ``skvq_group_size`` is
their mean size. With equal sizes the few channels of large means drown their neighbours: 2-bit keys of Gemma 3 270M
then have three times the squared error, those of SmolLM2-135M twice.

[design] Clusters are found per head, in the first tokens after the sinks (``n_calib_tokens``, or the window and at
least 64), then frozen. The clipping factor is searched per group when a token is encoded; the paper searches offline,
by an objective that is uncertain. Parameters are E4M3 bytes up to 4 bits and float16 above: on keys and values of both
models bytes change the squared error by -2 to +6 % at 2 and 3 bits, by +5 to +30 % at 4 and by +20 to +95 % at 5. Half
a bit for float16 pays from 5 bits on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.clipped import ALPHAS, ClippedToken
from ..codecs.clustered import ClusteredToken
from ..core.types import Recipe, Stream
from ._method import BITS, FLAG, MethodInfo, floats, ints, option, optional, refuse
from ._prerope import before_rope

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

FP8_BITS = 4  # wider codes need finer parameters than E4M3 holds
FIT_ROWS = 64  # fewest tokens that groups of channels are found in


@dataclass
class SKVQOptions:
    """Options of ``skvq``."""

    skvq_bits_key: int = option(2, "bits per key number", BITS)
    skvq_bits_value: int = option(2, "bits per value number", BITS)
    skvq_group_size: int = option(32, "channels per group", ints(2))
    skvq_window: int = option(128, "newest tokens that stay exact", ints(0))
    skvq_n_sink: int = option(5, "first tokens that stay exact", ints(0))
    skvq_reorder: bool = option(True, "put channels that are alike into one group", FLAG)
    skvq_clip_search: bool = option(True, "search the clipping factor per group", FLAG)
    skvq_clip_alpha: float = option(1.0, "clipping factor without the search", floats("(0, 1]"))
    skvq_max_ctx: int | None = option(None, "appending beyond it is an error; None: no limit", optional(ints(1)))


INFO = MethodInfo(
    name="skvq",
    title="SKVQ",
    family="group quantization",
    paper="SKVQ: Sliding-window Key and Value Cache Quantization for Large Language Models",
    arxiv="2405.06219",
    venue="COLM 2024",
    reads={"n_calib_tokens": optional(ints(1))},
    options=SKVQOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.skvq_clip_search and config.skvq_clip_alpha != 1.0:
        remedy = "Use skvq_clip_search=False with a factor of your own."
        refuse("skvq_clip_alpha", config.skvq_clip_alpha, "1.0 while skvq_clip_search is on", remedy)
    if not config.skvq_reorder and config.n_calib_tokens is not None:
        remedy = "Only the groups of channels are fitted: leave skvq_reorder on."
        refuse("n_calib_tokens", config.n_calib_tokens, "None while skvq_reorder is off", remedy)


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Every token is encoded on its own after it has left the window."""
    alphas = ALPHAS if config.skvq_clip_search else (config.skvq_clip_alpha,)
    fit_rows = config.n_calib_tokens or max(config.skvq_window, FIT_ROWS)

    def codec(bits: int, dim: int) -> ClippedToken:
        group, fp8 = config.skvq_group_size, bits <= FP8_BITS
        if config.skvq_reorder:
            return ClusteredToken(bits, group, dim=dim, fit_rows=fit_rows, alphas=alphas, fp8=fp8)
        return ClippedToken(bits, group, dim=dim, alphas=alphas, fp8=fp8)

    rotation, notes = before_rope(layer)
    window, sinks = config.skvq_window, config.skvq_n_sink
    return Recipe(
        keys=Stream(codec(config.skvq_bits_key, layer.head_dim), window=window, sinks=sinks, rotation=rotation),
        values=Stream(codec(config.skvq_bits_value, layer.value_dim), window=window, sinks=sinks),
        most=None if config.skvq_max_ctx is None else ("skvq_max_ctx", config.skvq_max_ctx),
        notes=notes,
    )
