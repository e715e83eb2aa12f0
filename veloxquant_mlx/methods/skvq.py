"""SKVQ: channels reordered into groups that are alike, clipped scales, a sliding window and sinks exact.

Paper: Duanmu et al., "SKVQ: Sliding-window Key and Value Cache Quantization for Large Language Models", COLM 2024,
arXiv:2405.06219. Uncertain: the objective of the paper's search for the clipping factor.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._method import BITS, FLAG, MethodInfo, floats, ints, option, optional


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
