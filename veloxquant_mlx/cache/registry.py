"""The 43 methods by name: identity, validation and recipe, each loaded from its own file when it is first asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..attention.kernels import launch
from ..core.exceptions import KernelUnavailableError, QuantizerConfigError
from ..methods import _general, vecinfer
from ..methods._method import MethodInfo, Valid, refuse

if TYPE_CHECKING:
    from ..core.types import LayerInfo, Recipe
    from ..models.inspect import Slot
    from ._flat import FlatConfig

MethodName = Literal[
    "turboquant_prod",
    "turboquant_mse",
    "turboquant_rvq",
    "polar",
    "qjl",
    "vecinfer",
    "spectral",
    "kivi",
    "kivi_sink",
    "svdq",
    "kitty",
    "adakv",
    "xquant",
    "kvquant",
    "palu",
    "cachegen",
    "minicache",
    "gear",
    "zipcache",
    "snapkv",
    "streaming_llm",
    "h2o",
    "tova",
    "pyramidkv",
    "squeeze",
    "chunkkv",
    "cam",
    "xkv",
    "nsnquant",
    "knorm",
    "skvq",
    "qfilters",
    "keyformer",
    "morphkv",
    "kvzip",
    "kvtc",
    "curdkv",
    "nestedkv",
    "amc",
    "a2ats",
    "anchorkv",
    "rocketkv",
    "age_tiered",
]
METHODS: tuple[str, ...] = get_args(MethodName)

# Shared fields that every method takes (``seed`` and ``store`` count where something is random or worth keeping). The
# kernel switches have rules of their own, and ``sliding_window`` belongs to the standalone methods.
COMMON = (
    "method",
    "head_dim",
    "enable_vectorized_attend",
    "seed",
    "dtype",
    "capacity",
    "store",
    "observers",
    "options",
)


@dataclass(frozen=True)
class Method:
    """One entry of the registry."""

    info: MethodInfo
    module: ModuleType

    @property
    def own_fields(self) -> list[str]:
        """The fields that the method reads beyond those of every cache."""
        return [*_options_of(self.info.options), *self.info.reads]

    def check(self, config: FlatConfig) -> None:
        """Raise ``QuantizerConfigError`` unless every field can be used by this method."""
        for name, valid, default in self._fields():
            value = getattr(config, name)
            if not valid.accepts(value):
                refuse(name, value, valid.text, f"The default is {default!r}.")
        self._check_unread(config)
        _check_kernels(config)
        if hasattr(self.module, "check"):
            self.module.check(config)
        if config.sliding_window is not None and not self.info.standalone:
            remedy = "Cap the cache with capacity, or choose a method that evicts, such as 'streaming_llm'."
            refuse("sliding_window", config.sliding_window, f"None for method {self.info.name!r}", remedy)

    def prepare(self, model: Any, slots: Sequence[Slot], config: FlatConfig) -> Sequence[Slot]:
        """``slots`` of ``model``, whose layers know what else the recipe needs of the model."""
        return self.module.prepare(model, slots, config) if hasattr(self.module, "prepare") else slots

    def recipe(self, config: FlatConfig, layer: LayerInfo) -> Recipe:
        """How a cache of ``layer`` stores its rows and what it drops; ``config`` has passed ``check``."""
        return self.module.recipe(config, layer)

    def _fields(self) -> Iterator[tuple[str, Valid, Any]]:
        """Name, valid values and default of every field that the method honours."""
        shared = _shared_fields()
        for name in (*COMMON, "sliding_window"):
            yield name, *shared[name]
        for name, valid in self.info.reads.items():
            yield name, valid, shared[name][1]
        for name, (valid, default) in _options_of(self.info.options).items():
            yield name, valid, default

    def _check_unread(self, config: FlatConfig) -> None:
        """A shared field that the method does not read must stay at its default."""
        own = _options_of(self.info.options)
        for name, (_, default) in _shared_fields().items():
            if name in COMMON or name in self.info.reads or name in own or name in KERNEL or name == "sliding_window":
                continue
            value = getattr(config, name)
            if value is not default and not (type(value) is type(default) and value == default):
                what = "a two-stream mode for outliers" if name == "bit_width_outlier" else f"a use for {name}"
                remedy = f"Method {self.info.name!r} does not have {what}; leave the field at its default."
                refuse(name, value, f"{default!r} for method {self.info.name!r}", remedy)


KERNEL = ("use_metal_kernels", "fused_sdpa", "fused_sdpa_max_ctx", "fused_sdpa_memory_bound")


def _check_kernels(config: FlatConfig) -> None:
    """A demand needs a device with kernels, and what only a kernel reads needs one that may run."""
    for name in KERNEL:
        value = getattr(config, name)
        if value is None or value is False:
            continue
        default = _shared_fields()[name][1]
        if launch.backend() is None:
            raise KernelUnavailableError(
                f"{name}={value!r} cannot be used: it must be {default!r}, because no kernel runs on the CPU. "
                "Leave it at the default: the cache then attends with MLX's own operations."
            )
        if name in KERNEL[2:] and config.fused_sdpa is False:
            refuse(name, value, f"{default!r} while fused_sdpa=False", "Set fused_sdpa to None or True, or leave it.")
        if config.use_metal_kernels is False:
            refuse(name, value, f"{default!r} while use_metal_kernels=False", "One of them says no kernel: choose.")


def _options_of(options: type | None) -> dict[str, tuple[Valid, Any]]:
    """Valid values and default of each field of an options class."""
    fields = dataclasses.fields(options) if options else ()
    return {f.name: (f.metadata["valid"], _default(f)) for f in fields}


def _default(f: dataclasses.Field) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


@cache
def _shared_fields() -> dict[str, tuple[Valid, Any]]:
    """Valid values and default of every field whose name carries no method's prefix."""
    groups = (_general.CoreFields, vecinfer.VecInferOptions, _general.SharedFields, _general.KernelFields)
    return {name: entry for group in groups for name, entry in _options_of(group).items()}


def method(name: str) -> Method:
    """The registry entry of ``name``; ``QuantizerConfigError`` if there is no such method."""
    if not isinstance(name, str) or name not in METHODS:
        raise QuantizerConfigError(f"unknown method {name!r}. Choices: {', '.join(METHODS)}.")
    return _load(name)


def shared_out(names: Sequence[str], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields of each of the methods ``names``: one goes to the first that has it, to the first where none has."""
    own = [method(name).own_fields for name in names]
    parts: list[dict[str, Any]] = [{} for _ in names]
    for key, value in fields.items():
        parts[next((i for i, part in enumerate(own) if key in part), 0)][key] = value
    return parts


@cache
def _load(name: str) -> Method:
    module = import_module(f"..methods.{name}", __package__)
    return Method(module.INFO, module)
