"""KVTC: principal components of keys (before RoPE) and values, bits by dynamic programming, entropy coding when saved.

Paper: Staniszewski, Lancucki, "KV Cache Transform Coding for Compact Storage in LLM Inference", ICLR 2026,
arXiv:2511.01815. No official code.

[design] The paper transforms all layers and heads together, for storage, with a shift and a scale per token and group
of components; decompressed before attention. Here every head has its own axes, which attention reads; a token has one
float16 size and a component a fixed spread, whose levels (Lloyd and Max) the bits choose: two scales of 16 bits are
nothing for 1024 components and a lot for 128. The heads of a layer share one allocation. The budget is absolute, per
token, head and tensor: 512 are 4 bits per number at a head size of 128. Files hold the codes range coded, where the
paper has DEFLATE. The grouped storage of the paper is not there.

Axes belong to a model: make them once with ``veloxquant calibrate --method kvtc`` and pass them as ``store``. Without
them they are those of the prompt, when it ends; a basis per sequence costs 32 D bits per number that it is used for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.allocation import best_bits
from ..codecs.base import ALL
from ..codecs.principal import TransformLevels
from ..core.types import Recipe, Stream
from ._axes import ROWS_PER_AXIS, origin, stored_axes
from ._method import MethodInfo, each, floats, ints, option, optional, refuse
from ._prerope import before_rope

if TYPE_CHECKING:
    import numpy as np

    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

SINKS, CHUNK = 4, 32  # the paper's sinks; our chunk
SIZE_BITS = 16  # of a token's budget
BYTE = 8


@dataclass
class KVTCOptions:
    """Options of ``kvtc``."""

    kvtc_bit_budget: int = option(512, "bits per token and head", ints(1))
    kvtc_bit_choices: tuple = option((0, 1, 2, 3, 4, 6, 8), "bits that a component may get", each(ints(0, 8)))
    kvtc_beta: float = option(3.5, "error ratio per bit where nothing was measured", floats("(1, inf)"))


INFO = MethodInfo(
    name="kvtc",
    title="KVTC",
    family="entropy coding",
    paper="KV Cache Transform Coding for Compact Storage in LLM Inference",
    arxiv="2511.01815",
    venue="ICLR 2026",
    needs="rope",
    reads={"residual_length": ints(0), "n_calib_tokens": optional(ints(1))},
    options=KVTCOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    choices = config.kvtc_bit_choices
    if list(choices) != sorted(set(choices)):
        refuse("kvtc_bit_choices", choices, "ascending, without repeats", f"Use {tuple(sorted(set(choices)))}.")
    if max(choices) == 0:
        refuse("kvtc_bit_choices", choices, "with a member above 0", "Zero bits alone would drop everything.")
    check_budget(config, config.head_dim)


def check_budget(config: FlatConfig, dim: int) -> None:
    """The budget must hold a token's size and the fewest bits of ``dim`` components."""
    choices = config.kvtc_bit_choices
    codes = max(-(-dim * choices[0] // BYTE), -(-min(c for c in choices if c) // BYTE)) * BYTE
    if config.kvtc_bit_budget < SIZE_BITS + codes:
        valid = f"an int >= {SIZE_BITS + codes}: 16 bits for the size of a token and {codes} for its {dim} components"
        refuse("kvtc_bit_budget", config.kvtc_bit_budget, valid, "Raise it or allow fewer bits.")


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """The first tokens and ``residual_length`` of the newest (128 in the paper too) stay exact."""
    choices, calib = tuple(config.kvtc_bit_choices), config.n_calib_tokens
    stored = stored_axes(config, layer, centred=True)
    rotation, notes = before_rope(layer)

    def allocate(errors: np.ndarray) -> np.ndarray:
        return best_bits(errors, choices, config.kvtc_bit_budget - SIZE_BITS, BYTE)

    def stream(part: str, dim: int) -> Stream:
        check_budget(config, dim)
        least, window = ROWS_PER_AXIS * dim, config.residual_length
        codec = TransformLevels(dim, allocate, choices, fit_rows=calib or ALL, least=least, beta=config.kvtc_beta)
        if stored is None:
            return Stream(codec, window=window, chunk=CHUNK, sinks=SINKS, fit_rows=calib or least)
        return Stream(codec.bind(codec.arrange(stored[part])), window=window, chunk=CHUNK, sinks=SINKS)

    keys = stream("k", layer.head_dim)
    rate = config.kvtc_bit_budget / max(layer.head_dim, layer.value_dim)
    return Recipe(
        keys=dataclasses.replace(keys, rotation=rotation),
        values=stream("v", layer.value_dim),
        deferred=stored is None and calib is None,
        notes=(
            *notes,
            f"at most {config.kvtc_bit_budget} bits per token, head and tensor: {rate:.2f} per number",
            origin(config, layer, stored is not None, "errors are not measured: bits by kvtc_beta"),
        ),
        from_store=stored is not None,
    )
