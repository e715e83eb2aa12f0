"""Ada-KV-style bits per head over KIVI: heads that matter more get more bits at a fixed mean.

Paper of the idea (an eviction method): Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget
Allocation for Efficient LLM Inference", NeurIPS 2025, arXiv:2407.11550. No paper describes bits per head: they are our
design, with the paper's sign (heads that look everywhere get more) and its floor (every head gets the fewest bits).

Keys and values are packed in blocks of ``residual_length`` tokens; of values the newest block stays exact as well.
Each block of each sequence has bits of its own, from the keys of the block and the queries of its last
``adakv_obs_window`` tokens, so that they do not depend on how a prompt was fed; with ``adakv_update_interval`` above
that length several blocks in a row share theirs. There are no runs of equal bits to keep few: the sum over the heads
is the same for all blocks, and with it the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..codecs.headwise import HeadKeys, HeadValues, block_multiple, shared_planes
from ..core.types import Recipe, Stream
from ..policies.importance import AttentionSpread, KeySpread
from ._method import BITS, MethodInfo, floats, ints, one_of, option, refuse

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo


@dataclass
class AdaKVOptions:
    """Options of ``adakv``."""

    adakv_target_avg_bits: float = option(2.5, "mean bits over the heads", floats("[1, 8]"))
    adakv_lo_bit: int = option(2, "fewest bits of a head", BITS)
    adakv_mid_bit: int = option(3, "middle bits of a head", BITS)
    adakv_hi_bit: int = option(4, "most bits of a head", BITS)
    adakv_group_size: int = option(32, "tokens per key group and channels per value group", ints(2))
    adakv_update_interval: int = option(1, "tokens between allocations", ints(1))
    adakv_importance: str = option(
        "norm_variance", "what makes a head important", one_of("norm_variance", "attention_entropy")
    )
    adakv_obs_window: int = option(32, "queries observed for attention_entropy", ints(1))


INFO = MethodInfo(
    name="adakv",
    title="Ada-KV-style bits per head",
    family="group quantization",
    paper="Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
    arxiv="2407.11550",
    venue="NeurIPS 2025",
    needs="real queries (attention_entropy only)",
    reads={"residual_length": ints(0)},
    options=AdaKVOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    lo, mid, hi = config.adakv_lo_bit, config.adakv_mid_bit, config.adakv_hi_bit
    if not lo <= mid <= hi:
        refuse("adakv_mid_bit", mid, f"in {lo}..{hi}, adakv_lo_bit to adakv_hi_bit", "Order the three bit-widths.")
    if not lo <= config.adakv_target_avg_bits <= hi:
        valid = f"in [{lo}, {hi}], adakv_lo_bit to adakv_hi_bit"
        refuse("adakv_target_avg_bits", config.adakv_target_avg_bits, valid, "Move the target or the bit-widths.")
    multiple, residual = block_multiple(_choices(config), config.adakv_group_size), config.residual_length
    if residual % multiple:
        valid = f"a multiple of {multiple}: whole groups of tokens whose codes fill whole words"
        refuse("residual_length", residual, valid, f"Use {(residual // multiple + 1) * multiple}.")
    block = residual or multiple
    if config.adakv_importance == "attention_entropy" and config.adakv_obs_window > block:
        remedy = "Lower it, or raise residual_length."
        refuse("adakv_obs_window", config.adakv_obs_window, f"<= {block}, the tokens of a block", remedy)


def _choices(config: FlatConfig) -> tuple[int, ...]:
    return tuple(sorted({config.adakv_lo_bit, config.adakv_mid_bit, config.adakv_hi_bit}))


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Keys and values in blocks; what a head has beyond the fewest bits lies in planes that all heads share."""
    choices, group, target = _choices(config), config.adakv_group_size, config.adakv_target_avg_bits
    heads = layer.kv_heads or 1  # not known before the first update, which builds the recipe anew
    block = config.residual_length or block_multiple(choices, group)
    planes = shared_planes(choices, target, heads)
    budget, interval = int(heads * target + 1e-9), config.adakv_update_interval
    if config.adakv_importance == "norm_variance":
        guide = KeySpread(choices, budget, block, interval)
    else:
        guide = AttentionSpread(choices, budget, block, interval, config.adakv_obs_window)
    same = target in (choices[0], choices[-1]) or (layer.kv_heads is not None and not planes)
    notes = (f"adakv_target_avg_bits={target}: all {heads} heads have the same bits",) if same else ()
    return Recipe(
        keys=Stream(HeadKeys(choices, planes, group, block), chunk=block),
        values=Stream(
            HeadValues(choices, planes, group, block, dim=layer.value_dim), window=config.residual_length, chunk=block
        ),
        guide=guide,
        notes=notes,
    )
