"""What a model's cache list looks like, slot by slot, and which slots a method can be applied to.

The model's own list is the template: its length differs from the number of layers in models that share keys and
values, loop over layers or have layers without attention.
"""

from __future__ import annotations

import importlib
import inspect
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import mlx.nn as nn

from ..attention import hook
from ..core.exceptions import QuantizerConfigError
from ..core.types import LayerInfo, is_int
from .probe import Probe, probe

_CACHE_MODULES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")
_RECURRENT = ("ArraysCache", "MambaCache")
# Why the caches of these classes are left alone; the receipt says it too.
NATIVE_REASONS = {
    "RotatingKVCache": "sliding window: bounded by the model's own cache",
    "ChunkedKVCache": "chunked attention: bounded by the model's own cache",
    "CacheList": "several caches in one slot: left to the model",
    **dict.fromkeys(_RECURRENT, "recurrent state"),
}
_WIDTH = ("hidden_size", "d_model", "n_embd", "hidden_dim", "model_dim")
_HEADS = ("num_attention_heads", "n_heads", "num_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")

_making = threading.local()


@dataclass(frozen=True)
class Slot:
    """One entry of the model's cache list.

    ``native`` is the cache that the model itself makes here. ``layer`` describes a slot that gets compressed; where it
    is None, ``reason`` says in plain words why. ``attention`` is the attention module that reads the slot, None for
    recurrent state, and ``block`` the decoder block that it is in. ``hooked``: real queries reach the cache; False: the
    layer attends by itself over decoded arrays; None: could not be tested.
    """

    index: int
    native: Any
    layer: LayerInfo | None = None
    attention: Any = None
    reason: str = ""
    hooked: bool | None = None
    block: Any = None


def cache_slots(model: Any, probing: bool = True) -> list[Slot]:
    """The slots of ``model`` in the order of its cache list; installs the seam.

    Without ``probing`` nothing is computed, so that weights need not be there; rotations are then not known.
    Raises QuantizerConfigError for a model without layers. Warns (UserWarning) when the model's ``make_cache`` raises.
    """
    hook.install(model)
    layers = decoder_blocks(model)
    natives = _template(model, layers)
    readers = [(layer, _attention(layer)) for layer in layers]
    # With one slot per layer nobody shares; else more or fewer attentions than slots mean that rows are read twice.
    with_keys = sum(_kind(native) not in _RECURRENT for native in natives)
    attending = sum(attention is not None for _, attention in readers)
    shared = len(natives) != len(layers) and with_keys != attending
    args = _args(model)

    slots: list[Slot] = []
    for index, (native, (layer, attention)) in enumerate(zip(natives, _assign(natives, readers), strict=True)):
        reason = _why_native(native, layer, attention)
        if reason:
            slots.append(Slot(index, native, None, None if _kind(native) in _RECURRENT else attention, reason))
            continue
        seen = probe(attention, _first(args, *_WIDTH)) if probing else Probe(None, None)
        info = replace(
            _geometry(attention, args),
            index=index,
            rope=seen.rope,
            key_bias=seen.key_bias,
            shared=shared,
            batches=seen.batches,
        )
        slots.append(Slot(index, native, info, attention, "", seen.hooked, layer))
    return _ranked(slots)


def slot_shapes(model: Any) -> list[tuple[Slot, LayerInfo | None]]:
    """The slots and the shape of what each holds, from the configuration alone; None where no attention fills it."""
    args = _args(model)
    return [
        (slot, slot.layer or (None if slot.attention is None else _geometry(slot.attention, args)))
        for slot in cache_slots(model, probing=False)
    ]


def hidden_size(model: Any) -> int | None:
    """The width of the model's hidden states, as configured."""
    return _first(_args(model), *_WIDTH)


def vocabulary(model: Any) -> int | None:
    """The number of tokens that the model knows, as configured."""
    return _first(_args(model), "vocab_size", "num_vocab", "padded_vocab_size")


def _ranked(slots: list[Slot]) -> list[Slot]:
    total = sum(slot.layer is not None for slot in slots)
    ranks = iter(range(total))
    return [
        s if s.layer is None else replace(s, layer=replace(s.layer, rank=next(ranks), n_layers=total)) for s in slots
    ]


# -- layers and the model's own cache list ----------------------------------------------------------------------------


def decoder_blocks(model: Any) -> list[Any]:
    """The layers of ``model`` in their order; QuantizerConfigError for a model without layers."""
    for owner in (model, getattr(model, "model", None), *language_models(model)):
        layers = getattr(owner, "layers", None)
        if layers is not None and not callable(layers):
            return list(layers)
    raise QuantizerConfigError(
        f"model: {type(model).__name__} has neither .layers nor .model.layers; pass a decoder as returned by "
        "mlx_lm.load (for a wrapper, its language_model)"
    )


def language_models(model: Any) -> list[Any]:
    """The language models inside a wrapper, innermost first."""
    inner = getattr(getattr(model, "model", None), "language_model", None)
    return [m for m in (inner, getattr(model, "language_model", None)) if m is not None]


def _args(model: Any) -> Any:
    """The arguments that describe attention: the model's own, for wrappers without a width the language model's."""
    owners = [model, *language_models(model)]
    found = [a for m in owners for a in (getattr(m, "args", None), getattr(m, "config", None)) if a is not None]
    return next((a for a in found if _first(a, *_WIDTH)), found[0] if found else None)


def _template(model: Any, layers: list[Any]) -> list[Any]:
    """What the class-level ``make_cache`` builds; a function on the instance is a user's hook and never called."""
    if getattr(_making, "active", False):
        raise QuantizerConfigError(
            f"model: make_cache of a part of {type(model).__name__} calls for_model again; set make_cache on the "
            "outermost model only"
        )
    makers = ((m, c) for m in (*language_models(model), model) for c in type(m).__mro__ if "make_cache" in vars(c))
    owner, cls = next(makers, (None, None))
    if owner is not None:
        _making.active = True
        try:
            return list(vars(cls)["make_cache"].__get__(owner)())
        except QuantizerConfigError:
            raise
        except Exception as error:  # a model's own code may raise anything; the caller is told what
            warnings.warn(
                f"make_cache of {type(owner).__name__} raised {type(error).__name__}: {error}; every layer gets a "
                "plain cache instead, which is wrong for sliding-window and recurrent layers",
                UserWarning,
                stacklevel=3,
            )
        finally:
            _making.active = False
    library = "mlx_vlm" if type(model).__module__.startswith("mlx_vlm.") else "mlx_lm"
    plain = importlib.import_module(f"{library}.models.cache").KVCache
    return [plain() for _ in layers]


def _kind(native: Any) -> str:
    """Name of a cache type of mlx_lm or mlx_vlm, "" for any other type."""
    return type(native).__name__ if type(native).__module__ in _CACHE_MODULES else ""


def _assign(natives: list[Any], readers: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The (layer, attention) that fills each slot; (None, None) for a slot that no attention claims."""
    if len(natives) == len(readers):
        return readers
    # Other lengths: the k-th slot with keys belongs to the k-th layer that stores keys; looped models start over.
    owners = [r for r in readers if _stores_kv(r[1])] or [r for r in readers if r[1] is not None]
    assigned, count = [], 0
    for native in natives:
        has_keys = bool(owners) and _kind(native) not in _RECURRENT
        assigned.append(owners[count % len(owners)] if has_keys else (None, None))
        count += has_keys
    return assigned


def _why_native(native: Any, layer: Any, attention: Any) -> str:
    """Why a slot keeps the model's own cache; "" if it gets compressed."""
    kind = _kind(native)
    if kind != "KVCache":
        return NATIVE_REASONS.get(kind, f"{type(native).__name__}: not a plain key-value cache")
    if attention is None:
        return "no attention"
    return "latent attention (MLA)" if _is_latent(layer) else ""


# -- attention modules ------------------------------------------------------------------------------------------------


def _attention(layer: Any) -> Any:
    """``self_attn``, else ``attn``, else (hybrids: mixer, attention, …) the first part whose code updates a cache.

    Where ``self_attn`` or ``attn`` only wraps such a part, the part.
    """
    named = next((a for a in (getattr(layer, n, None) for n in ("self_attn", "attn")) if a is not None), None)
    if named is not None and (_stores_kv(named) or not isinstance(named, nn.Module)):
        return named
    source = layer if named is None else named
    parts = source.modules() if isinstance(source, nn.Module) else []
    return next((part for part in parts if part is not source and _stores_kv(part)), named)


def _functions(part: Any) -> Iterator[FunctionType]:
    for cls in type(part).__mro__:
        if cls not in (object, dict, nn.Module):
            yield from (f for f in vars(cls).values() if inspect.isfunction(f))


def _stores_kv(part: Any) -> bool:
    return any("update_and_fetch" in f.__code__.co_names for f in _functions(part))


def _is_latent(layer: Any) -> bool:
    """Multi-head latent attention keeps a latent and a rotary key in place of keys and values."""
    parts = layer.modules() if isinstance(layer, nn.Module) else []
    return any(
        ("embed_q" in part and "unembed_out" in part) or type(part).__module__ == "mlx_lm.models.mla" for part in parts
    )


def _first(source: Any, *names: str) -> int | None:
    """The first of ``names`` that ``source`` has as a positive int."""
    values = (getattr(source, name, None) for name in names)
    return next((v for v in values if is_int(v) and v > 0), None)


def _geometry(attention: Any, args: Any) -> LayerInfo:
    """Head sizes and counts as configured; caches take the real ones from their first update."""
    query_heads = _first(attention, *_HEADS) or _first(args, *_HEADS)
    width, all_heads = _first(args, *_WIDTH), _first(args, *_HEADS) or query_heads
    head_dim = _first(attention, "head_dim", "q_head_dim", "qk_head_dim") or _first(args, "head_dim")
    head_dim = head_dim or (width // all_heads if width and all_heads else LayerInfo.head_dim)
    return LayerInfo(
        head_dim=head_dim,
        value_dim=_first(attention, "v_head_dim") or head_dim,
        kv_heads=_first(attention, *_KV_HEADS) or _first(args, *_KV_HEADS) or query_heads,
        query_heads=query_heads,
    )
