"""Palu: low-rank latents of keys and values per group of heads, the latents quantised.

Paper: Chang et al., "Palu: KV-Cache Compression with Low-Rank Projection", ICLR 2025, arXiv:2407.21118.

The cache projects the rows that it is given, keys before RoPE; keys are rebuilt tile by tile, values are summed as
latents and expanded once per query row. Where the basis of a group comes from, in order of fidelity
(``basis_source`` in the receipt):

- a calibration text: ``veloxquant calibrate --method palu``, passed as ``store``. This is the paper's whitened basis;
  ``n_calib_tokens`` has no say then;
- the weights of the layer, whenever a model is at hand: the paper's basis without whitening. Not for keys that are
  normed after their projection (Qwen3, Gemma 3) or that turn in a way that is not known;
- the sequence itself: its first ``n_calib_tokens`` (which has it so even where there are weights), or the prompt when
  it ends. Then the basis belongs to the sequence, and is made of more than four tokens per latent: rows stay as they
  are until there are so many. Where a method drops tokens first, what stays may be fewer, and latents are then too.

[design] The paper has one width and gives layers their ranks by Fisher information; here the leading latents get
``palu_hi_bit`` and the others ``palu_lo_bit`` (equal: the paper's), 16 bits are float16, and ranks follow
``palu_rank`` or the energy, rounded up to whole 32 (below 32: to whole 8). Groups of a layer share the largest rank
that one of them needs, and consist of heads of one process: models split over machines have groups of their own.
After a method that keeps other tokens in every head, latents join rows of different tokens.

A basis that knows what hidden states look like is worth a lot. Measured on SmolLM2-135M (1,024 tokens of a story and 64
scored, one group of 3 heads, half the rank, latents float16), mean KL from the uncompressed cache: values alone 4.5
with the weights' basis, 0.29 with that of another part of the text, 0.30 with the prompt's; keys alone 0.30 and 0.040
(weights, text); both 0.27 (text). The default settings keep nearly all latents of its heads of 64: 0.19 at 4.9 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..artifacts.calibration import CalibrationArtifact, calibrated
from ..artifacts.sealed import raw_bytes
from ..codecs.base import ALL
from ..codecs.headgroups import FLOAT, ROWS_PER_LATENT, GroupLatents
from ..core.types import Recipe, Stream
from ..models.projections import Linear, projections, remembered
from ..models.rope import UnknownRotation
from ._method import FLAG, MethodInfo, floats, ints, one_of, option, optional, refuse
from ._prerope import before_rope

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo
    from ..models.inspect import Slot

BITS = one_of(1, 2, 3, 4, 5, 6, 8, FLOAT)
PARTS = {"k": "keys", "v": "values"}
FEWEST = ROWS_PER_LATENT * 8 + 1  # tokens of a fit: for 8 latents


@dataclass
class PALUOptions:
    """Options of ``palu``."""

    palu_rank: int | None = option(None, "rank per head; None: by energy", optional(ints(1)))
    palu_energy_threshold: float = option(0.9, "share of the energy (squared singular values) kept", floats("(0, 1]"))
    palu_n_head_groups: int = option(4, "groups of heads that share a basis", ints(1))
    palu_hi_bit: int = option(4, "bits of the leading latents; 16: float16", BITS)
    palu_lo_bit: int = option(2, "bits of the other latents; 16: float16", BITS)
    palu_hi_fraction: float = option(0.25, "share of leading latents", floats("[0, 1]"))
    palu_group_size: int = option(32, "numbers per group", ints(2))
    palu_quantize_values: bool = option(True, "False: value latents stay float16", FLAG)


INFO = MethodInfo(
    name="palu",
    title="Palu",
    family="low rank",
    paper="Palu: KV-Cache Compression with Low-Rank Projection",
    arxiv="2407.21118",
    venue="ICLR 2025",
    needs="rope",
    reads={"n_calib_tokens": optional(ints(FEWEST))},
    options=PALUOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    if config.palu_lo_bit > config.palu_hi_bit:
        refuse("palu_lo_bit", config.palu_lo_bit, f"<= palu_hi_bit = {config.palu_hi_bit}", "Swap the two.")
    if config.palu_rank is not None and config.palu_rank > config.head_dim:
        refuse("palu_rank", config.palu_rank, f"None or an int <= head_dim = {config.head_dim}", "Lower it.")


def prepare(model: Any, slots: Sequence[Slot], config: FlatConfig) -> Sequence[Slot]:
    """Bases from the weights of ``model``, found once for each of its layers."""
    if isinstance(config.store, CalibrationArtifact) or config.n_calib_tokens is not None:
        return slots
    from ..models.inspect import hidden_size  # imports mlx_lm, which takes seconds

    width = hidden_size(model)

    def told(slot: Slot, layer: LayerInfo) -> Slot:
        settings = _settings(config), isinstance(layer.rope, UnknownRotation), layer.key_bias is None, _print(slot)
        derived = remembered(
            slot.attention, 0, settings, lambda: _of_weights(config, layer, projections(slot.attention, width))
        )
        return dataclasses.replace(slot, layer=dataclasses.replace(layer, derived=derived))

    return [slot if slot.layer is None else told(slot, slot.layer) for slot in slots]


def recipe(config: FlatConfig, layer: LayerInfo) -> Recipe:
    """Every token is encoded on its own, from the start where there is a basis."""
    rotation, notes = before_rope(layer)
    bases = layer.derived if config.n_calib_tokens is None else {}
    if from_store := isinstance(config.store, CalibrationArtifact):
        artifact = config.store
        bases = remembered(artifact, layer.index, _settings(config), lambda: _of_artifact(config, layer))
    source = "calibration artifact" if from_store else "weights"
    calib, told = config.n_calib_tokens, list(notes)
    streams: dict[str, Stream] = {}
    for (part, name), dim in zip(PARTS.items(), (layer.head_dim, layer.value_dim), strict=True):
        codec, basis, offset = _codec(config, part), bases.get(f"{part}_basis"), bases.get(f"{part}_offset")
        heads = -(-layer.kv_heads // config.palu_n_head_groups) if layer.kv_heads else 1
        if isinstance(basis, mx.array):
            streams[part] = Stream(codec.bound(basis, offset if isinstance(offset, mx.array) else None))
            told.append(f"{name}: {basis.shape[3]} latents for {heads * dim} numbers; basis_source: {source}")
            continue
        rank = dim if config.palu_rank is None else min(config.palu_rank, dim)
        least = calib or ROWS_PER_LATENT * heads * rank + 1
        streams[part] = Stream(codec, fit_rows=least)
        when = f"the first {calib} tokens" if calib else f"the prompt when it ends, once there are {least} tokens"
        reason = "" if calib else bases.get(part, "no model is at hand")
        told.append(f"{name}: basis_source: {when}" + (f" ({reason})" if reason else ""))
    own = any(stream.fit_rows for stream in streams.values())
    return Recipe(
        keys=dataclasses.replace(streams["k"], rotation=rotation),
        values=streams["v"],
        deferred=own and calib is None,
        notes=tuple(told),
        from_store=from_store,
    )


def _codec(config: FlatConfig, part: str) -> GroupLatents:
    bits = (config.palu_hi_bit, config.palu_lo_bit)
    return GroupLatents(
        config.palu_n_head_groups,
        bits if part == "k" or config.palu_quantize_values else (FLOAT, FLOAT),
        rank=config.palu_rank,
        energy=config.palu_energy_threshold,
        share=config.palu_hi_fraction,
        group=config.palu_group_size,
        fit_rows=config.n_calib_tokens or ALL,
    )


def _settings(config: FlatConfig) -> tuple[Any, ...]:
    """All that bases depend on, besides where they come from."""
    return tuple(getattr(config, field.name) for field in dataclasses.fields(PALUOptions))


def _print(slot: Slot) -> bytes:
    """The first numbers of every weight of the layer's attention: tuned or loaded anew they are others."""
    if not isinstance(slot.attention, nn.Module):
        return b""
    leaves: Any = tree_flatten(slot.attention.parameters())
    return b"".join(raw_bytes(weight.reshape(-1)[:8]) for _, weight in sorted(leaves))


def _of_weights(
    config: FlatConfig, layer: LayerInfo, found: tuple[Linear | str, Linear | str]
) -> dict[str, mx.array | str]:
    """Bases and offsets by name, and under ``k`` and ``v`` why there is none."""
    out: dict[str, mx.array | str] = {}
    for part, linear in zip(PARTS, found, strict=True):
        if part == "k" and isinstance(layer.rope, UnknownRotation):
            linear = "weights give keys before their positions"
        if isinstance(linear, str):
            out[part] = linear
            continue
        codec = _codec(config, part)
        out[f"{part}_basis"] = codec.arrange(codec.learn(linear.rows))["basis"]
        if linear.offset is not None and (part == "v" or layer.key_bias is None):  # else it is taken out already
            out[f"{part}_offset"] = linear.offset
    mx.eval([a for a in out.values() if isinstance(a, mx.array)])
    return out


def _of_artifact(config: FlatConfig, layer: LayerInfo) -> dict[str, mx.array | str]:
    """Bases from the axes that ``veloxquant calibrate`` found."""
    heads, dims = layer.kv_heads, {"k": layer.head_dim, "v": layer.value_dim}
    shapes: dict[str, tuple[int | None, ...]] = {}
    for part, dim in dims.items():
        shapes |= {f"{part}_axes": (heads, dim, None), f"{part}_energy": (None, None)}
    found = calibrated(config, layer, **shapes)
    assert found is not None, "the store is an artifact"
    out: dict[str, mx.array | str] = {}
    for part in PARTS:
        axes, energy = (found[f"{part}_{name}"][None] for name in ("axes", "energy"))
        if energy.shape[1] != min(config.palu_n_head_groups, axes.shape[1]):
            remedy = "Axes belong to groups of heads: use the number that they were made for."
            refuse(
                "palu_n_head_groups", config.palu_n_head_groups, f"{energy.shape[1]}, as in {config.store!r}", remedy
            )
        out[f"{part}_basis"] = _codec(config, part).arrange({"axes": axes, "energy": energy})["basis"]
    mx.eval(list(out.values()))
    return out
