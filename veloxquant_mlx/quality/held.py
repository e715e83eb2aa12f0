"""Bytes that a method holds of any model at any context, from what a measured row held.

A row's bytes are split by kind, and each kind grows in its own way: codes with the tokens that are packed, float rows
with those that are not, which a method's recipe tells for every context; positions with the tokens that stay;
constants with the model alone. Layers that keep the model's own cache are counted apart.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..cache.base import KVCacheConfig, parts_of
from ..cache.compose import compose
from ..cache.registry import method
from ..cache.rows import GROW
from ..core.types import LayerInfo, Recipe, Stream
from .plans import Plan
from .results import Comparison, Row
from .shape import Shape

WINDOW = "stream_window_size"  # what streaming_llm keeps, under another name than the budgets of the others


@dataclass(frozen=True)
class Numbers:
    """Numbers in keys and values, packed and as floats, and rows of all heads, over the layers of a model.

    ``waiting``: numbers that are floats until the prompt has been read, because nothing is packed or dropped before.
    """

    packed: int
    floats: int
    rows: int
    waiting: int
    per_token: int


def recipes(plan: Plan, layers: Sequence[LayerInfo]) -> list[Recipe]:
    """What ``plan`` makes of each layer. Raises ``QuantizerConfigError`` where it cannot be used with one."""
    return _recipes(plan.method, json.dumps(dict(plan.fields), sort_keys=True), tuple(layers))


@functools.lru_cache(maxsize=256)
def _recipes(name: str, fields: str, layers: tuple[LayerInfo, ...]) -> list[Recipe]:
    parts, made = parts_of(Plan(name, name, json.loads(fields)).config()), []
    for layer in layers:
        own: list[Recipe] = []
        for part in parts:
            config: Any = dataclasses.replace(part, head_dim=layer.head_dim)
            method(part.method).check(config)
            members = min(getattr(config, f"{part.method}_group_size"), len(layers)) if _joins(part) else 1
            own.append(method(part.method).recipe(config, dataclasses.replace(layer, members=members)))
        made.append(own[0] if len(own) == 1 else compose(own[0], own[1], (parts[0].method, parts[1].method)))
    return made


def _joins(config: KVCacheConfig) -> bool:
    return method(config.method).info.family == "cross-layer"


def numbers(plan: Plan, layers: Sequence[LayerInfo], prompt: int, after: int = 0) -> Numbers:
    """What caches hold after a prompt and ``after`` more tokens."""
    packed = floats = rows = waiting = per_token = 0
    for layer, recipe in zip(layers, recipes(plan, layers), strict=True):
        heads = layer.kv_heads or 1
        kept, most = _kept(recipe, prompt, after), _waiting(recipe, prompt)
        rows += heads * kept
        for stream, dim in ((recipe.keys, layer.head_dim), (recipe.values, layer.value_dim)):
            sealed = _sealed(stream, kept, after)
            packed += heads * dim * _room(sealed)
            floats += heads * dim * (_room(kept - sealed) if stream.grows else kept - sealed)
            waiting += heads * dim * most
            per_token += heads * dim
    return Numbers(packed, floats, rows, waiting, per_token)


def _room(rows: int) -> int:
    """Buffers grow in steps."""
    return math.ceil(rows / GROW) * GROW


def _kept(recipe: Recipe, prompt: int, after: int) -> int:
    """Tokens that are not dropped."""
    policy = recipe.eviction
    if policy is None or not policy.drops:
        return prompt + after
    budget = policy.rows(prompt)
    if policy.bounded:
        return min(prompt + after, budget)
    if policy.per_step:  # the next token's row is there before another one goes
        return min(prompt + after, budget + (after > 0))
    return min(prompt, budget) + after


def _waiting(recipe: Recipe, prompt: int) -> int:
    policy = recipe.eviction
    until_end = policy is not None and policy.drops and not policy.bounded
    if not recipe.deferred and not until_end:
        return 0
    return min(prompt, recipe.most_raw[1]) if recipe.most_raw else prompt


def _sealed(stream: Stream, kept: int, after: int) -> int:
    """Rows held as codes."""
    if stream.codec is None:
        return 0
    if stream.prompt is None:
        return stream.n_sealed(kept)
    block = stream.n_due(kept - after)
    return block + stream.n_sealed(kept - block, fitted=True)


def measured_layers(found: Comparison) -> list[LayerInfo]:
    """The layers that were compressed, all as the first of them."""
    model = found.model
    return [
        LayerInfo(model.head_dim, model.head_dim, model.kv_heads, index=i, rank=i, n_layers=model.layers)
        for i in range(model.layers)
    ]


@dataclass(frozen=True)
class Held:
    """Bytes of a cache; ``peak`` is the most while the prompt is read."""

    bytes: int
    peak: int


@dataclass(frozen=True)
class Scale:
    """A measured row made into a formula: ``Scale(found, row)(shape, tokens)``."""

    found: Comparison
    row: Row

    def __call__(self, shape: Shape, tokens: int) -> Held:
        """Bytes for a prompt of so many tokens."""
        found, row = self.found, self.row
        assert row.bytes is not None and row.nbytes is not None and row.bits is not None
        plan = Plan(row.label, row.method, row.fields)
        then = numbers(plan, measured_layers(found), found.ctx, found.scored - 1)
        now = numbers(stretched(plan, found.ctx, tokens), shape.layers, tokens)
        seen, wide = found.ctx + found.scored - 1, now.per_token / then.per_token
        # Bits are of the compressed layers alone: what is held beyond is in layers with the model's own cache.
        ours = row.bits / 8 * then.per_token * seen
        window = max(0.0, row.bytes["window"] - (row.nbytes - ours))
        usual = min(window, 2 * then.floats)  # the rest are rows that a method could not pack: they come with tokens
        grown = wide * tokens / seen
        held = (
            row.bytes["packed"] * (now.packed / then.packed if then.packed else grown)
            + (usual * (now.floats / then.floats if then.floats else 1) + (window - usual) * grown) * shape.itemsize / 2
            + row.bytes["index"] * now.rows / then.rows
            + row.bytes["fixed"] * wide
        )
        total = int(held) + shape.left_alone(tokens)
        return Held(total, max(total, now.waiting * shape.itemsize + shape.left_alone(tokens)))


def stretched(plan: Plan, ctx: int, tokens: int) -> Plan:
    """``plan`` for a longer context than it was measured at: a method that drops tokens keeps the same share."""
    if tokens <= ctx:
        return plan
    fields = dict(plan.fields)
    for part in parts_of(plan.config()):
        options = method(part.method).info.options
        names = [f.name for f in dataclasses.fields(options)] if options else []
        for name in names:
            if name == WINDOW or (name.endswith("_budget") and not name.endswith(("resolved_budget", "bit_budget"))):
                fields[name] = math.ceil(getattr(part, name) * tokens / ctx)
    return dataclasses.replace(plan, fields=fields)
