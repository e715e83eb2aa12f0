"""Configuration, factory and builder: the public way from a method's name to a list of caches."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import mlx.core as mx
import numpy as np

from ..artifacts.calibration import CalibrationArtifact
from ..core.exceptions import QuantizerConfigError
from ..core.types import LayerInfo, is_int
from ._flat import OWNER, FlatConfig
from .compose import check_pair
from .registry import MethodName, method

if TYPE_CHECKING:
    from mlx_lm.models.cache import KVCache as ServingCache

    from ..coordinators.base import Coordinator
    from ..core.abstractions import ArtifactStore, KVCache, QuantizationObserver
    from ..models.inspect import Slot

__all__ = ["STANDALONE_METHODS", "KVCacheBuilder", "KVCacheConfig", "KVCacheFactory", "MethodName"]

# What for_model takes: one configuration, or one that drops tokens and one that packs those that stay.
ModelConfig = Union["KVCacheConfig", Sequence["KVCacheConfig"]]

# Methods whose documented product is the library's own KVCache, fed token by token.
STANDALONE_METHODS = frozenset({"turboquant_prod", "turboquant_mse", "polar", "qjl", "spectral"})


class KVCacheConfig(FlatConfig):
    """What to build: a method's name and the fields of all methods (see ``veloxquant_mlx.cache.options``).

    The values of ``options`` fill the flat fields at construction; a flat field that is named in the constructor wins.
    Assigning a method's flat field later works and warns that its options class is preferred. Nothing is validated
    here: the factory, the builder and ``for_model`` do that. Note that ``dataclasses.replace`` names every field.

    >>> from veloxquant_mlx.cache.options import KIVIOptions
    >>> KVCacheConfig(method="kivi", options=KIVIOptions(kivi_group_size=64)).kivi_group_size
    64
    """

    if not TYPE_CHECKING:  # type checkers see the dataclass signature

        @functools.wraps(FlatConfig.__init__)
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if dataclasses.is_dataclass(self.options) and not isinstance(self.options, type):
                named = {f.name for f, _ in zip(dataclasses.fields(self), args, strict=False)} | kwargs.keys()
                for f in dataclasses.fields(self.options):
                    if f.name in OWNER and f.name not in named:
                        self.__dict__[f.name] = getattr(self.options, f.name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A field that is already in the instance was set by the constructor: this is a later assignment.
        if name in OWNER and name in self.__dict__:
            remedy = f"pass options={OWNER[name]}({name}=...) to KVCacheConfig instead"
            warnings.warn(f"setting {name} directly is deprecated; {remedy}", DeprecationWarning, stacklevel=2)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"KVCacheConfig(method={self.method!r}, d={self.head_dim}, b={self.bit_width_inlier}, seed={self.seed})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheConfig):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    def __deepcopy__(self, memo: dict) -> KVCacheConfig:
        """A copy that shares store and observers; an ``mx.Dtype`` cannot be copied and need not be."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            if name == "observers":
                new.__dict__[name] = copy.copy(value)
            else:
                new.__dict__[name] = value if name in ("store", "dtype") else copy.deepcopy(value, memo)
        return new


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (mx.array, np.ndarray)) or isinstance(b, (mx.array, np.ndarray)):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return bool(a == b)


def _check_type(config: Any) -> None:
    if not isinstance(config, KVCacheConfig):
        raise QuantizerConfigError(
            f"config={config!r} cannot be used: it must be a KVCacheConfig, such as KVCacheConfig(method='kivi')."
        )


def parts_of(config: ModelConfig) -> list[KVCacheConfig]:
    """The one or two configurations in ``config``; ``QuantizerConfigError`` for anything else."""
    parts: list[Any] = list(config) if isinstance(config, (list, tuple)) else [config]
    if len(parts) not in (1, 2):
        raise QuantizerConfigError(
            f"config is a {type(config).__name__} of {len(parts)}: it must hold one configuration, or two of which the "
            "first drops tokens and the second packs those that stay. Pass for example [snapkv, kivi]."
        )
    for part in parts:
        _check_type(part)
    if len(parts) == 2:
        check_pair(*parts)
    return parts


def name_of(config: ModelConfig) -> str:
    """The method's name, or both as in ``snapkv+kivi``."""
    return "+".join(part.method for part in parts_of(config))


def _check_bit_list(bits: Sequence) -> None:
    if len(bits) == 0:
        raise QuantizerConfigError(
            "bit_width_inlier list must not be empty: give one int per attention layer, or a single int for all."
        )
    for i, b in enumerate(bits):
        if not is_int(b) or b < 1:
            raise QuantizerConfigError(
                f"every element of bit_width_inlier must be an int >= 1, but element {i} is {b!r}. Correct it."
            )


def _layer_configs(config: KVCacheConfig, slots: Sequence[Slot]) -> list[KVCacheConfig]:
    """The configuration of every slot: head size and bits of its layer, a seed of its own.

    A list of bits has one element per slot with attention; slots without take the first, which nothing reads.
    """
    bits = config.bit_width_inlier
    if isinstance(bits, (list, tuple)):
        _check_bit_list(bits)
        readers = sum(slot.attention is not None for slot in slots)
        if len(bits) != readers:
            raise QuantizerConfigError(
                f"bit_width_inlier has {len(bits)} elements, but the model has {readers} attention layers. Give one "
                "element per attention layer (sliding-window layers included), or a single int."
            )
        elements = iter(bits)
        per_slot = [bits[0] if slot.attention is None else next(elements) for slot in slots]
    else:
        per_slot = [bits] * len(slots)
    made = []
    for slot, b in zip(slots, per_slot, strict=True):
        layer_config = dataclasses.replace(config, bit_width_inlier=b)
        if slot.layer is not None:
            layer_config.head_dim = slot.layer.head_dim
        if is_int(config.seed):
            layer_config.seed = config.seed + slot.index
        made.append(layer_config)
    return made


class KVCacheFactory:
    """Builds one cache from a configuration."""

    @staticmethod
    def create(config: KVCacheConfig) -> KVCache | ServingCache:
        """A cache of one layer whose heads have ``config.head_dim`` numbers.

        The standalone methods give a ``veloxquant_mlx.KVCache``, all others a subclass of mlx_lm's ``KVCache``. Raises
        ``QuantizerConfigError`` for a value that the method cannot use.
        """
        _check_type(config)
        if isinstance(config.bit_width_inlier, (list, tuple)) and config.method != "vecinfer":
            raise QuantizerConfigError(
                f"bit_width_inlier={config.bit_width_inlier!r} cannot be used here: one cache takes a single int. "
                "Give a list to KVCacheBuilder.for_model(model, config), one element per attention layer."
            )
        entry = method(config.method)
        entry.check(config)

        own = copy.deepcopy(config)  # what the caller changes later was never checked
        if own.method in STANDALONE_METHODS:
            from .standalone import standalone  # imports mlx_lm, which takes seconds

            return standalone(own)

        from ..attention import hook
        from .layer import CompressedKVCache

        hook.install()
        cache = CompressedKVCache(own, LayerInfo(head_dim=own.head_dim, value_dim=own.head_dim))
        if cache.coordinator is not None:
            cache.coordinator.alone()
        return cache


class KVCacheBuilder:
    """Collects a configuration step by step; ``build()`` checks it and makes the cache.

    >>> cache = KVCacheBuilder().with_method("kivi").with_head_dim(64).with_bit_width(inlier=4).build()
    """

    def __init__(self) -> None:
        self._config = KVCacheConfig()

    def __repr__(self) -> str:
        return f"KVCacheBuilder(config={self._config!r})"

    def _with(self, **fields: Any) -> KVCacheBuilder:
        for name, value in fields.items():
            setattr(self._config, name, value)
        return self

    def with_method(self, method: str) -> KVCacheBuilder:
        """Set the compression method, one of ``MethodName``."""
        return self._with(method=method)

    def with_head_dim(self, d: int) -> KVCacheBuilder:
        """Set the size of a head, a power of 2."""
        return self._with(head_dim=d)

    def with_bit_width(self, inlier: int | list[int], outlier: int | None = None) -> KVCacheBuilder:
        """Set the bits; ``outlier`` gives the outlier channels bits of their own."""
        return self._with(bit_width_inlier=inlier, bit_width_outlier=outlier)

    def with_jl_dim(self, m: int) -> KVCacheBuilder:
        """Set the rows of the Johnson-Lindenstrauss sketch, at most the head size."""
        return self._with(jl_dim=m)

    def with_n_outlier_channels(self, n: int) -> KVCacheBuilder:
        """Set the number of outlier channels, fewer than the head size."""
        return self._with(n_outlier_channels=n)

    def with_n_calib_tokens(self, n: int) -> KVCacheBuilder:
        """Set how many tokens are seen before a fit is frozen."""
        return self._with(n_calib_tokens=n)

    def with_vectorized_attend(self, enabled: bool = True) -> KVCacheBuilder:
        """Attend on many packed keys at once; False: the plain reference path."""
        return self._with(enable_vectorized_attend=enabled)

    def with_outlier_two_stream(self, enabled: bool = True) -> KVCacheBuilder:
        """Store outlier channels in a stream of their own."""
        return self._with(enable_outlier_two_stream=enabled)

    def with_fused_query_dot(self, enabled: bool = True) -> KVCacheBuilder:
        """Score rotated queries against the codebook directly."""
        return self._with(enable_fused_query_dot=enabled)

    def with_seed(self, seed: int) -> KVCacheBuilder:
        """Set the seed of everything random."""
        return self._with(seed=seed)

    def with_precision(self, dtype: Any) -> KVCacheBuilder:
        """Set the dtype in which attention multiplies, such as ``mx.float16``."""
        return self._with(dtype=dtype)

    def with_capacity(self, max_tokens: int) -> KVCacheBuilder:
        """Set the most tokens that the cache may hold."""
        return self._with(capacity=max_tokens)

    def with_artifact_store(self, store: ArtifactStore) -> KVCacheBuilder:
        """Look rotations and codebooks up in ``store``."""
        return self._with(store=store)

    def with_observer(self, observer: QuantizationObserver) -> KVCacheBuilder:
        """Add a receiver of events."""
        self._config.observers.append(observer)
        return self

    def with_sliding_window(self, window_size: int) -> KVCacheBuilder:
        """Keep the newest ``window_size`` tokens only."""
        return self._with(sliding_window=window_size)

    def build(self) -> KVCache | ServingCache:
        """Check the configuration and make the cache; ``QuantizerConfigError`` says what is wrong."""
        self._check()
        return KVCacheFactory.create(copy.deepcopy(self._config))

    def _check(self) -> None:
        c = self._config

        def refuse(name: str, valid: str) -> None:
            raise QuantizerConfigError(
                f"{name}={getattr(c, name)!r} cannot be used: it must be an int {valid}. Give the builder such a value."
            )

        d, bits, m, n_out, n_calib = c.head_dim, c.bit_width_inlier, c.jl_dim, c.n_outlier_channels, c.n_calib_tokens
        if not is_int(d) or d < 1 or d & (d - 1):
            refuse("head_dim", ">= 1 that is a power of 2")
        if isinstance(bits, (list, tuple)):
            _check_bit_list(bits)
        elif not is_int(bits) or bits < 1:
            refuse("bit_width_inlier", ">= 1")
        if m is not None and (not is_int(m) or m > d):
            refuse("jl_dim", f"<= head_dim = {d}")
        if n_out is not None and (not is_int(n_out) or n_out >= d):
            refuse("n_outlier_channels", f"< head_dim = {d}")
        if n_calib is not None and (not is_int(n_calib) or n_calib < 1):
            refuse("n_calib_tokens", ">= 1")

    @staticmethod
    def for_model(model: Any, config: ModelConfig, serve_standalone: bool = False) -> list:
        """One cache per entry of the model's own cache list, sized by layer; works for text and vision models.

        Full-attention layers get a compressed cache, the others keep what the model would use there. A list in
        ``bit_width_inlier`` has one element per attention layer. The seed grows by the layer's index. A standalone
        method needs ``serve_standalone=True``. Two configurations are combined: the first drops tokens, the second
        packs those that stay. Raises ``QuantizerConfigError``; warns if no layer can be compressed.

        >>> caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi"))  # doctest: +SKIP
        >>> both = [KVCacheConfig(method="snapkv"), KVCacheConfig(method="kivi")]
        >>> caches = KVCacheBuilder.for_model(model, both)  # doctest: +SKIP
        """
        parts = parts_of(config)
        for part in parts:
            if part.method in STANDALONE_METHODS and not serve_standalone:
                raise QuantizerConfigError(
                    f"method {part.method!r} is standalone: KVCacheFactory.create builds its cache, which is fed token "
                    "by token. To run a model with it, call for_model(model, config, serve_standalone=True) or choose "
                    "another method."
                )
            if part.sliding_window is not None:
                raise QuantizerConfigError(
                    f"sliding_window={part.sliding_window!r} cannot be used here: it must be None, because only what "
                    "KVCacheFactory.create makes of a standalone method has a window. Drop tokens with a method that "
                    "evicts instead, such as [KVCacheConfig(method='streaming_llm'), ...]."
                )

        from ..attention import forward, hook  # imports mlx_lm, which takes seconds
        from ..models.inspect import cache_slots, language_models
        from .layer import CompressedKVCache

        slots = cache_slots(model)
        if not slots:
            raise QuantizerConfigError(
                f"model={type(model).__name__} has no layers: it must have model.layers or model.model.layers. "
                "Pass the loaded language model."
            )
        per_slot: list[list[KVCacheConfig]] = []
        for part in parts:
            if isinstance(part.store, CalibrationArtifact):
                part.store.check_model(model)
            per_slot.append(_layer_configs(part, slots))
            served = [c for slot, c in zip(slots, per_slot[-1], strict=True) if slot.layer is not None]
            for layer_config in served or per_slot[-1]:
                method(part.method).check(layer_config)
        hook.install(model)
        for part in parts:
            slots = method(part.method).prepare(model, slots, part)
        caches, blind, compressed = [], [], 0
        coordinators: dict[Coordinator | None, None] = {}
        for slot, *layer_configs in zip(slots, *per_slot, strict=True):
            if slot.layer is None:
                slot.native.left_alone = slot.reason  # for the receipt
                caches.append(slot.native)
                continue
            compressed += 1
            caches.append(CompressedKVCache(layer_configs[0], slot.layer, *layer_configs[1:]))
            coordinators[caches[-1].coordinator] = None
            if slot.hooked is False and caches[-1].needs_queries:
                blind.append(slot.index)
        if blind:
            raise QuantizerConfigError(
                f"method={name_of(config)!r} needs the model's queries, but the attention of cache entries {blind} "
                "does not go through mlx_lm's shared attention function. Choose a method that needs no queries."
            )
        for coordinator in filter(None, coordinators):
            coordinator.attach(model, slots)
            forward.install(model, *language_models(model))
        if not compressed:
            reasons = ", ".join(sorted({slot.reason for slot in slots}))
            message = f"no layer of this model can be compressed ({reasons}): its own caches are returned"
            warnings.warn(message, UserWarning, stacklevel=2)
        return caches
