"""Which methods a comparison measures, with which settings: one plan is one row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..artifacts.calibration import CalibrationArtifact
from ..cache.base import KVCacheConfig, ModelConfig
from ..cache.registry import METHODS, method, shared_out
from ..calibrate.widths import bit_fields, valid_bits
from ..core.exceptions import QuantizerConfigError
from ..methods._method import refuse

Shown = tuple[tuple[str, dict[str, Any]], ...]  # label and configuration of every row

# Every method, at default settings but for the bits: 128 exact tokens for kivi, budgets of 512 tokens.
SHOWN: Shown = (
    ("kivi, 4 bits", {"method": "kivi", "bit_width_inlier": 4}),
    ("kivi, 2 bits", {"method": "kivi", "bit_width_inlier": 2}),
    ("kivi_sink, 2 bits", {"method": "kivi_sink", "bit_width_inlier": 2}),
    ("kitty, 2 and 4 bits", {"method": "kitty"}),
    ("adakv, 2.5 bits", {"method": "adakv"}),
    ("gear, 2 bits", {"method": "gear"}),
    ("xquant, 2 + 4 bits", {"method": "xquant"}),
    ("minicache", {"method": "minicache"}),
    ("zipcache, 4 and 2 bits", {"method": "zipcache"}),
    ("turboquant_mse, 4 bits", {"method": "turboquant_mse", "bit_width_inlier": 4}),
    ("turboquant_prod, 4 bits", {"method": "turboquant_prod", "bit_width_inlier": 4}),
    ("turboquant_rvq, 2 x 2 bits", {"method": "turboquant_rvq", "bit_width_inlier": 2}),
    ("turboquant_rvq, 2 x 1 bit", {"method": "turboquant_rvq", "bit_width_inlier": 1}),
    ("polar, 2 bits", {"method": "polar", "bit_width_inlier": 2}),
    ("nsnquant, 2 bits", {"method": "nsnquant"}),
    ("qjl, 1 and 2 bits", {"method": "qjl", "jl_dim": 128, "n_outlier_channels": 8}),
    ("cachegen, 4 bits at first", {"method": "cachegen"}),
    ("kvquant, 3 bits", {"method": "kvquant"}),
    ("skvq, 2 bits", {"method": "skvq"}),
    ("age_tiered, 8 to 2 bits", {"method": "age_tiered"}),
    ("vecinfer, 3 and 1 bits", {"method": "vecinfer"}),
    ("amc, 16, 8 and 4 bits", {"method": "amc"}),
    ("spectral, 4 bits", {"method": "spectral", "bit_width_inlier": 4}),
    ("svdq, keys alone", {"method": "svdq"}),
    ("kvtc, 256 bits a row", {"method": "kvtc", "kvtc_bit_budget": 256}),
    ("palu, 4 and 2 bits", {"method": "palu"}),
    ("xkv, 4-bit latents", {"method": "xkv"}),
    ("anchorkv, 5 % at most", {"method": "anchorkv"}),
    ("a2ats, reads a fifth", {"method": "a2ats"}),
    ("snapkv, 512 tokens", {"method": "snapkv", "snap_budget": 512}),
    ("streaming_llm, 512 tokens", {"method": "streaming_llm", "stream_window_size": 508}),
    ("knorm, 512 tokens", {"method": "knorm"}),
    ("qfilters, 512 tokens", {"method": "qfilters", "qfilters_on_low_retention": "ignore"}),
    ("curdkv, 512 tokens", {"method": "curdkv"}),
    ("nestedkv, 512 tokens", {"method": "nestedkv"}),
    ("h2o, 512 tokens", {"method": "h2o"}),
    ("pyramidkv, 512 tokens", {"method": "pyramidkv"}),
    ("squeeze, 512 tokens", {"method": "squeeze"}),
    ("chunkkv, 512 tokens", {"method": "chunkkv"}),
    ("tova, 512 tokens", {"method": "tova"}),
    ("keyformer, 512 tokens", {"method": "keyformer"}),
    ("morphkv, 512 tokens", {"method": "morphkv"}),
    ("cam, 512 tokens", {"method": "cam"}),
    ("rocketkv, ratio 8", {"method": "rocketkv"}),
    ("kvzip, 512 tokens", {"method": "kvzip"}),
)

# A short choice of it: packing, fewer bits, vectors, dropping by attention and by age.
SHORT = (
    "kivi, 4 bits",
    "kivi, 2 bits",
    "turboquant_rvq, 2 x 2 bits",
    "snapkv, 512 tokens",
    "streaming_llm, 512 tokens",
)


@dataclass(frozen=True)
class Plan:
    """One row to measure: ``method`` as in ``kivi`` or ``snapkv+kivi``, ``fields`` that are not at their defaults.

    A ``store`` among the fields is the path of a calibration file.
    """

    label: str
    method: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The family of the method, both joined for a pair."""
        return " + ".join(method(name).info.family for name in self.method.split("+"))

    def config(self) -> ModelConfig:
        """The configuration, or the two of a pair: a field goes to the first of them that has it.

        Raises ``QuantizerConfigError`` for an unknown method or field, ``ArtifactNotFoundError`` for a missing store.
        """
        names, known = self.method.split("+"), {f.name for f in dataclasses.fields(KVCacheConfig)}
        fields: dict[str, Any] = {}
        for key, value in self.fields.items():
            if key not in known - {"method", "options", "observers"}:
                usual = ", ".join(field for name in names for field in method(name).own_fields) or "none"
                refuse(key, value, "a field of KVCacheConfig", f"The options of {self.method!r} are: {usual}.")
            fields[key] = CalibrationArtifact.load(value) if key == "store" and value else value
        parts = zip(names, shared_out(names, fields), strict=True)
        configs = [KVCacheConfig(method=name, **part) for name, part in parts]  # type: ignore[arg-type]
        return configs if len(configs) > 1 else configs[0]


def families() -> dict[str, list[str]]:
    """The methods by family."""
    found: dict[str, list[str]] = {}
    for entry in map(method, METHODS):
        found.setdefault(entry.info.family, []).append(entry.info.name)
    return found


def plans(
    methods: Iterable[str] = (), of_families: Iterable[str] = (), every: bool = False, bits: Sequence[int] = ()
) -> list[Plan]:
    """The rows of ``SHOWN`` of the methods and families named (pairs as in ``snapkv+kivi``), of all, or of ``SHORT``.

    ``bits`` adds a row for every width that a chosen method takes. Raises ``QuantizerConfigError`` for names that do
    not exist and for a width that no chosen method takes.
    """
    names, kinds = [name.strip() for name in methods], families()
    for one in (kind.strip() for kind in of_families):
        if one not in kinds:
            refuse("family", one, f"one of {', '.join(kinds)}", "See: veloxquant methods")
        names += kinds[one]
    if every:
        names += [name for kind in kinds.values() for name in kind]
    found: list[Plan] = []
    if names:
        order = {name: i for i, name in enumerate(dict.fromkeys(fields["method"] for _, fields in SHOWN))}
        single = sorted({name for name in names if "+" not in name}, key=lambda name: order.get(name, -1))
        for name in [*single, *dict.fromkeys(name for name in names if "+" in name)]:
            found += _default(name)
    else:
        found = [_plan(label, fields) for label, fields in SHOWN if label in SHORT]
    made = list(found)
    for name in dict.fromkeys(plan.method for plan in found):
        base = next(plan for plan in found if plan.method == name)
        made += [plan for b in bits if (plan := _at(base, b)) is not None]
    taken = {b for b in bits if any(_at(plan, b) is not None for plan in found)}
    if left := [b for b in bits if b not in taken]:
        refuse("bits", left[0], "a width that one of the chosen methods takes", "Such as 4,3,2 for kivi.")
    default, unique = KVCacheConfig(), {}
    for plan in made:
        changed = sorted((k, str(v)) for k, v in plan.fields.items() if v != getattr(default, k))
        unique.setdefault((plan.method, *changed), plan)
    return list(unique.values())


def _plan(label: str, fields: Mapping[str, Any]) -> Plan:
    return Plan(label, fields["method"], {name: value for name, value in fields.items() if name != "method"})


def _default(name: str) -> list[Plan]:
    """The rows of a method; of a pair, its two methods at the first of their own."""
    parts = name.split("+")
    for part in parts:
        if part not in METHODS:
            choices = ", ".join(METHODS)
            refuse("method", part, f"one of {choices}", "Join a method that drops tokens and one that packs by +.")
    own = [[_plan(label, fields) for label, fields in SHOWN if fields["method"] == part] for part in parts]
    if len(parts) == 1:
        return own[0]
    if len(parts) > 2:
        raise QuantizerConfigError(f"method={name!r} cannot be used: two methods can be combined, not {len(parts)}.")
    fields = {key: value for plans_ in own for key, value in plans_[0].fields.items()}
    return [Plan(" + ".join(plans_[0].label for plans_ in own), name, fields)]


def _at(plan: Plan, bits: int) -> Plan | None:
    """``plan`` with another width, None where its method has no such width."""
    packing = plan.method.split("+")[-1]
    try:
        names, valid = bit_fields(packing), valid_bits(packing)
    except QuantizerConfigError:  # the method has no field for bits
        return None
    if not valid.accepts(bits):
        return None
    label = f"{plan.method}, {bits} bit{'s' * (bits != 1)}"
    return Plan(label, plan.method, {**plan.fields, **dict.fromkeys(names, bits)})
