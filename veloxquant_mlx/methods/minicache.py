"""MiniCache: neighbouring deep layers share directions by spherical interpolation and keep their own norms.

Paper: Liu et al., "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models", NeurIPS 2024,
arXiv:2405.14366. Uncertain: the sign in the paper's retention formula and its constants; rows are retained here where
the cosine between the layers is below ``minicache_retention_threshold``, keys and values each for themselves.

[design] Retained rows of the first layer stand where the shared direction would be, so that only the other layers take
more memory for them. Where more than half of the pairs in the first 256 tokens of a group would be retained, all of its
keys (or values) stay as they came; under tensor parallelism those are the pairs of a rank's own heads. Tokens are
merged 64 at a time (fewer, as those 256, where ``minicache_max_ctx`` is below), with one wait for the device each time.
More than two layers share the mean of their unit vectors, normalised: ``minicache_slerp_t`` says nothing there, and two
layers of a cosine below the threshold are enough to retain a token. Keys of models with a large bias are held without
it as float16, retained ones too.

Measured on SmolLM2-135M-Instruct, 1,024 tokens of prompt and 64 scored, float16 rows: the heads of neighbouring layers
have little in common. At thresholds of 0.9 and 0.5 all pairs would be retained, so that nothing is merged and 16.0 bits
per number are held. At 0.0, five of the fourteen tensors in groups are merged, with 43 to 49 % of their pairs retained:
15.4 bits, mean KL 0.22. The receipt tells the retention rate; expect savings only where that is low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..codecs.merged import Merged
from ..core.types import Recipe, Stream
from ._groups import grouped
from ._method import MethodInfo, floats, ints, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo
    from ..models.inspect import Slot

FIT_ROWS = 256
BLOCK = 64
BIASED = "key_bias"  # in ``LayerInfo.derived``


@dataclass
class MiniCacheOptions:
    """Options of ``minicache``."""

    minicache_start_frac: float = option(0.5, "depth from which layers are merged", floats("[0, 1]"))
    minicache_group_size: int = option(2, "layers merged together", ints(2))
    minicache_retention_threshold: float = option(0.9, "cosine below which a token is kept unmerged", floats("[-1, 1]"))
    minicache_slerp_t: float = option(0.5, "place of the merged direction between two layers", floats("[0, 1]"))
    minicache_max_ctx: int = option(8192, "tokens that may wait as floats at once before the receipt says so", ints(1))


INFO = MethodInfo(
    name="minicache",
    title="MiniCache",
    family="cross-layer",
    paper="MiniCache: KV Cache Compression in Depth Dimension for Large Language Models",
    arxiv="2405.14366",
    venue="NeurIPS 2024",
    options=MiniCacheOptions,
)


def prepare(model: Any, slots: Sequence[Slot], config: FlatConfig) -> Sequence[Slot]:
    """Groups of neighbours from ``minicache_start_frac`` of the depth on."""
    layers = sum(slot.layer is not None for slot in slots)
    slots = grouped(slots, config.minicache_group_size, ceil(config.minicache_start_frac * layers))
    joined = [(slot, slot.layer) for slot in slots if slot.layer is not None and slot.layer.members > 1]
    biased = {layer.group for _, layer in joined if layer.key_bias is not None}
    told = {BIASED: "keys of a layer in the group are held without theirs"}
    known = {slot.index: replace(layer, derived=told) for slot, layer in joined if layer.group in biased}
    return [replace(slot, layer=known[slot.index]) if slot.index in known else slot for slot in slots]


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Both tensors merged in blocks, once there are enough tokens to see whether that pays; layers alone stay plain."""
    members, most = layer.members, config.minicache_max_ctx
    if members == 1:
        start = f"layers before minicache_start_frac={config.minicache_start_frac} of the depth stay as they came"
        early = layer.rank < ceil(config.minicache_start_frac * layer.n_layers) and layer.n_layers > 1
        return Recipe(Stream(), Stream(), notes=(start if early else "a layer that has no partner stays as it came",))

    def stream(dtype: mx.Dtype | None = None) -> Stream:
        codec = Merged(
            config.minicache_retention_threshold,
            config.minicache_slerp_t,
            members=members,
            member=layer.member,
            fit_rows=min(FIT_ROWS, most),
            dtype=dtype,
        )
        return Stream(codec, chunk=min(BLOCK, most))

    biased = layer.key_bias is not None or BIASED in layer.derived
    mean = f"{members} layers share the mean of their directions; minicache_slerp_t is for two"
    return Recipe(
        # Without the constant part of a bias keys come in float32, whatever the model's dtype, and all that are packed
        # with them become as wide.
        keys=stream(mx.float16 if biased else None),
        values=stream(),
        together=members,
        most_raw=("minicache_max_ctx", most),
        notes=(mean,) if members > 2 else (),
    )
