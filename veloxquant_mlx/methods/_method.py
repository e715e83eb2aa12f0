"""What every method file says: its options with help text and valid range, its identity, the shared fields it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.exceptions import KernelUnavailableError, QuantizerConfigError
from ..core.types import is_int

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass(frozen=True)
class Valid:
    """The values that a field accepts: ``text`` says it to people ("must be <text>"), ``accepts`` tests it."""

    text: str
    accepts: Callable[[Any], bool]


def ints(low: int, high: int | None = None) -> Valid:
    """Integers from ``low`` to ``high``, both included; no upper end without ``high``."""
    text = f"an int >= {low}" if high is None else f"an int in {low}..{high}"
    return Valid(text, lambda v: is_int(v) and v >= low and (high is None or v <= high))


def floats(interval: str) -> Valid:
    """Finite numbers in an interval written as in mathematics, such as ``"(0, 1]"`` or ``"[0, inf)"``."""
    low, high = (float(end) for end in interval[1:-1].split(","))

    def accepts(v: Any) -> bool:
        if not (isinstance(v, float) or is_int(v)) or not math.isfinite(v):
            return False
        above = v >= low if interval[0] == "[" else v > low
        below = v <= high if interval[-1] == "]" else v < high
        return above and below

    return Valid(f"a finite number in {interval}", accepts)


def one_of(*choices: Any) -> Valid:
    """One of the listed values; 1, 1.0 and True are different values."""
    text = "one of " + ", ".join(repr(c) for c in choices)
    return Valid(text, lambda v: any(type(v) is type(c) and v == c for c in choices))


def optional(valid: Valid) -> Valid:
    """None, or what ``valid`` accepts."""
    return Valid(f"None or {valid.text}", lambda v: v is None or valid.accepts(v))


def each(valid: Valid) -> Valid:
    """A list or tuple that is not empty and whose members ``valid`` accepts."""
    text = f"a non-empty tuple, every member {valid.text}"
    return Valid(text, lambda v: isinstance(v, (list, tuple)) and len(v) > 0 and all(valid.accepts(m) for m in v))


FLAG = Valid("True or False", lambda v: isinstance(v, bool))
BITS = one_of(1, 2, 3, 4, 5, 6, 8)
BACKEND = one_of("auto", "mlx", "metal", "reference")
ARRAY = Valid("None or an array", lambda v: v is None or hasattr(v, "shape"))


def option(default: Any, help: str, valid: Valid) -> Any:
    """A dataclass field that carries its help text and its valid range."""
    return field(default=default, metadata={"help": help, "valid": valid})


def refuse(name: str, value: Any, valid: str, remedy: str) -> NoReturn:
    """Raise the one form of configuration error: field, value, valid range, remedy."""
    raise QuantizerConfigError(f"{name}={value!r} cannot be used: it must be {valid}. {remedy}")


@dataclass(frozen=True)
class MethodInfo:
    """The identity of a method.

    ``reads`` maps the fields outside the method's own options that it honours to the values it accepts there; any
    other shared field must stay at its default. ``needs`` says what it cannot work without. ``paper`` is the title of
    the source, None where there is no paper.
    """

    name: str
    title: str
    family: str
    paper: str | None = None
    arxiv: str | None = None
    venue: str = ""
    options: type | None = None
    needs: str = "nothing"
    standalone: bool = False
    reads: Mapping[str, Valid] = field(default_factory=dict)


# The shared fields of the two-stream split (TurboQuant, arXiv:2504.19874).
TWO_STREAM: Mapping[str, Valid] = MappingProxyType(
    {
        "bit_width_outlier": optional(BITS),
        "n_outlier_channels": optional(ints(1)),
        "n_calib_tokens": optional(ints(1)),
        "enable_outlier_two_stream": FLAG,
    }
)


def bits_of(config: FlatConfig) -> int:
    """``bit_width_inlier`` of a checked configuration, where it is a single int."""
    assert not isinstance(config.bit_width_inlier, (list, tuple))
    return config.bit_width_inlier


def check_two_stream(config: FlatConfig) -> None:
    """The rules between the two-stream fields: they count only once the split is on, and must leave inliers."""
    on = config.bit_width_outlier is not None or config.enable_outlier_two_stream
    for name in ("n_outlier_channels", "n_calib_tokens"):
        if getattr(config, name) is not None and not on:
            remedy = "Switch the split of outlier channels on with bit_width_outlier or enable_outlier_two_stream=True."
            refuse(name, getattr(config, name), "None while the split is off", remedy)
    check_outliers(config)


def check_outliers(config: FlatConfig) -> None:
    """Outlier channels must leave at least one inlier channel."""
    n = config.n_outlier_channels
    if n is not None and n >= config.head_dim:
        refuse("n_outlier_channels", n, f"an int < head_dim = {config.head_dim}", "Use a quarter of the head or fewer.")


def check_room(config: FlatConfig, budget: str, *parts: str, extra: int = 0) -> None:
    """``budget`` must be greater than the sum of the fields ``parts`` (and ``extra`` tokens that are always kept)."""
    reserved = sum(getattr(config, name) for name in parts) + extra
    if getattr(config, budget) <= reserved:
        terms = " + ".join([f"{name}={getattr(config, name)}" for name in parts] + [str(extra)] * (extra > 0))
        valid = f"an int > {reserved}, the tokens that are always kept ({terms})"
        refuse(budget, getattr(config, budget), valid, f"Raise {budget} or lower {parts[-1]}.")


def check_capacity(config: FlatConfig, budget: str) -> None:
    """``capacity``, a hard cap for a method that keeps ``budget`` rows, cannot be below that budget."""
    rows = getattr(config, budget)
    if config.capacity is not None and config.capacity < rows:
        valid, remedy = f"None or an int >= {budget} = {rows}", f"Raise capacity or lower {budget}."
        refuse("capacity", config.capacity, valid, remedy)


def check_backend(config: FlatConfig, name: str) -> None:
    """No method that drops rows has a Metal kernel."""
    if getattr(config, name) == "metal":
        raise KernelUnavailableError(
            f"{name}='metal' cannot be used: it must be 'auto', 'mlx' or 'reference', because no Metal kernel of "
            "this package exists yet. Use 'auto'."
        )
