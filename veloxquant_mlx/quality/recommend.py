"""The best method and width for a model, a memory and a context, from measured rows.

A row is evidence where it ran and packed or dropped something. If the model itself was measured, its rows alone count;
else those of all models do, and the worst of them decides. A method passes where no KL is above ``max_kl`` and no share
of planted facts, of those that the uncompressed cache finds, is below ``min_needle``. Of those that pass and fit the
smallest KL wins; KLs up to ``TIE`` above it count as equal, and then the fastest wins. What is not measured is said.

A longer context than the measured one: a method that drops tokens keeps the share that was measured, and one that packs
tokens the coarser the older they are does not pass, since most of them would be coarser than in what was measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.exceptions import CacheInputError, QuantizerConfigError
from ..core.text import size
from .held import Scale, recipes, stretched
from .plans import Plan
from .results import Comparison, Row
from .shape import Shape

TABLES = Path(__file__).with_name("tables")
MAX_KL = 0.1  # nats: above it one first choice in five or more changes in what was measured
MIN_NEEDLE = 0.9
TIE = 0.005  # nats
NOTHING = 15.0  # bits per number from which a row has packed nothing worth the name
LONGEST = 1 << 24  # tokens up to which contexts are tried
RUNNERS_UP = 5


def tables() -> list[Comparison]:
    """The comparisons that ship with the package."""
    return [Comparison.load(file) for file in sorted(TABLES.glob("*.json"))]


@dataclass(frozen=True)
class Evidence:
    """What one row says. ``needle`` is the share of the facts that the uncompressed cache finds."""

    model: str
    ctx: int
    text: str
    machine: str
    kl: float
    needle: float | None
    speed: float | None


@dataclass(frozen=True)
class Choice:
    """A method with its settings for the context that was asked for.

    ``held`` are its bytes then and ``peak`` the most while the prompt is read; ``kl`` the lowest and the highest that
    was measured, ``needle`` and ``speed`` the lowest. ``against`` says why its quality is not good enough.
    """

    label: str
    method: str
    fields: Mapping[str, Any]
    held: int
    peak: int
    fits: bool
    kl: tuple[float, float]
    needle: float | None
    speed: float | None
    against: tuple[str, ...]
    notes: tuple[str, ...]
    evidence: tuple[Evidence, ...]

    @property
    def plan(self) -> Plan:
        return Plan(self.label, self.method, self.fields)


@dataclass(frozen=True)
class Advice:
    """``best`` and why, if anything fits; ``smallest`` and the context that it would fit, if nothing does.

    ``room`` is what the weights leave of ``memory``, ``uncompressed`` the bytes of the model's own cache and
    ``uncompressed_context`` what that would fit. ``left_out`` maps labels to the reason why they do not count,
    ``extrapolates`` says what of all this was not measured.
    """

    model: str
    memory: int
    weights: int
    room: int
    context: int
    uncompressed: int
    uncompressed_fits: bool
    uncompressed_context: int
    best: Choice | None
    why: str
    smallest: Choice | None
    smallest_context: int
    others: tuple[Choice, ...]
    left_out: Mapping[str, str]
    extrapolates: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)


def recommend(
    shape: Shape,
    measured: Sequence[Comparison],
    memory: int,
    context: int,
    *,
    max_kl: float = MAX_KL,
    min_needle: float = MIN_NEEDLE,
) -> Advice:
    """Choose for ``shape`` with ``memory`` bytes for weights and cache, and a prompt of ``context`` tokens.

    Raises ``CacheInputError`` for numbers or tables that cannot be used and ``QuantizerConfigError`` for a model
    without a layer that methods compress.
    """
    if context < 1 or memory < 1:
        raise CacheInputError(f"memory={memory}, context={context} cannot be used: both must be at least 1.")
    if not measured:
        raise CacheInputError("there is nothing to recommend from: give at least one comparison.")
    if not shape.layers:
        raise QuantizerConfigError(f"{shape.name}: no layer can be compressed ({'; '.join(shape.notes)}).")
    itself = [found for found in measured if is_of(shape, found)]
    room, used = memory - shape.weights, itself or list(measured)
    choices, scales, left_out = [], {}, {}
    for label, rows in _by_label(used).items():
        try:
            choice, scales[label] = _choice(shape, label, rows, context, room, max_kl, min_needle)
            choices.append(choice)
        except (_NoEvidence, QuantizerConfigError) as error:
            left_out[label] = str(error)
    fitting = _ranked([c for c in choices if c.fits and not c.against])
    poor = sorted((c for c in choices if c.fits and c.against), key=lambda c: c.kl[1])
    best = (fitting or poor or [None])[0]
    smallest, most = None, 0
    if best is None and choices:
        able = [c for c in choices if not c.against] or choices
        smallest = min(able, key=lambda c: c.peak)
        most = _most(lambda n: scales[smallest.label](shape, n).peak, room)
    rest = [*fitting, *poor] if best else sorted(choices, key=lambda c: (bool(c.against), c.peak))
    whole = shape.uncompressed(context)
    return Advice(
        model=shape.name,
        memory=memory,
        weights=shape.weights,
        room=room,
        context=context,
        uncompressed=whole,
        uncompressed_fits=whole <= room,
        uncompressed_context=_most(shape.uncompressed, room),
        best=best,
        why=_why(best, fitting, max_kl, min_needle),
        smallest=smallest,
        smallest_context=most,
        others=tuple(c for c in rest if c is not (best or smallest))[:RUNNERS_UP],
        left_out=left_out,
        extrapolates=_extrapolates(shape, used, bool(itself), context),
        notes=shape.notes,
    )


def is_of(shape: Shape, found: Comparison) -> bool:
    """Whether a comparison is of this model, as far as its shape and its number of parameters tell."""
    model, first = found.model, shape.layers[0]
    told = (model.layers, model.kv_heads, model.head_dim, model.parameters)
    return told == (len(shape.layers), first.kv_heads or 0, first.head_dim, shape.parameters)


class _NoEvidence(Exception):
    """No row says anything about a setting."""


Rows = list[tuple[Comparison, Row]]


def _by_label(measured: Sequence[Comparison]) -> dict[str, Rows]:
    """The rows of all comparisons by setting; those of one method and its fields belong together."""
    found: dict[tuple[str, str], Rows] = {}
    for table in measured:
        for row in table.rows:
            key = row.method, json.dumps(dict(row.fields), sort_keys=True)
            found.setdefault(key, []).append((table, row))
    return {rows[0][1].label: rows for rows in found.values()}


def _choice(
    shape: Shape, label: str, rows: Rows, context: int, room: int, max_kl: float, min_needle: float
) -> tuple[Choice, Scale]:
    useful, against, notes = [], [], []
    for found, row in rows:
        if row.error is not None:
            against.append(f"failed on {found.model.name}")
        elif row.bits is not None and row.bits < NOTHING:
            useful.append((found, row))
        else:
            notes.append(f"saved nothing at {found.ctx:,} tokens on {found.model.name}, which is no evidence")
    if not useful:
        raise _NoEvidence("; ".join([*against, *notes]))
    # Of the rows whose heads are nearest in size, the one that makes the most of it.
    distance = {id(row): abs(math.log2(found.model.head_dim / shape.head_dim)) for found, row in useful}
    nearest = [Scale(*pair) for pair in useful if distance[id(pair[1])] == min(distance.values())]
    scale = max(nearest, key=lambda scale: scale(shape, context).bytes)
    held = scale(shape, context)
    evidence = tuple(_evidence(*pair) for pair in useful)
    kls, needles, speeds = ([getattr(e, name) for e in evidence] for name in ("kl", "needle", "speed"))
    needle, speed = (min((v for v in values if v is not None), default=None) for values in (needles, speeds))
    if max(kls) > max_kl:
        against.append(f"KL {max(kls):.3f} above {max_kl:g}")
    if needle is not None and needle < min_needle:
        against.append(f"needles {needle:.0%} below {min_needle:.0%}")
    base, ctx = Plan(label, rows[0][1].method, rows[0][1].fields), scale.found.ctx
    plan = stretched(base, ctx, context)
    if context > ctx and any(r.keys.older or r.values.older for r in recipes(plan, shape.layers)):
        against.append("old tokens coarser than in what was measured")
    if changed := [f"{name}={value}" for name, value in plan.fields.items() if value != base.fields.get(name)]:
        notes.append(f"keeps the share of tokens that was measured: {', '.join(changed)}")
    if held.peak > held.bytes:
        notes.append(f"holds the prompt uncompressed until it has been read: {size(held.peak)}")
    name = label if plan == base else f"{label.split(',')[0]}, {', '.join(changed)}"
    return (
        Choice(
            label=name,
            method=plan.method,
            fields=dict(plan.fields),
            held=held.bytes,
            peak=held.peak,
            fits=held.peak <= room,
            kl=(min(kls), max(kls)),
            needle=needle,
            speed=speed,
            against=tuple(against),
            notes=tuple(notes),
            evidence=evidence,
        ),
        scale,
    )


def _evidence(found: Comparison, row: Row) -> Evidence:
    plain, own = found.uncompressed, row.needle
    facts = plain.needle.mean if plain is not None and plain.needle is not None else 0
    return Evidence(
        model=found.model.name,
        ctx=found.ctx,
        text=found.text.name,
        machine=found.machine,
        kl=row.mean_kl or 0.0,
        needle=own.mean / facts if own is not None and facts else None,
        speed=row.decode_speed,
    )


def _ranked(choices: Sequence[Choice]) -> list[Choice]:
    """The smallest KL first; of those that are as good, the fastest, then the one with the fewest bytes."""
    least = min((c.kl[1] for c in choices), default=0.0)

    def order(c: Choice) -> tuple[float, float, int]:
        tied = c.kl[1] <= least + TIE
        return (least if tied else c.kl[1], -(c.speed or 0), c.held)

    return sorted(choices, key=order)


def _why(best: Choice | None, fitting: Sequence[Choice], max_kl: float, min_needle: float) -> str:
    if best is None:
        return "nothing fits"
    if not fitting:
        return (
            f"the smallest KL of what fits, but nothing that fits is good enough: KL at most {max_kl:g}, and "
            f"{min_needle:.0%} of the planted facts that the uncompressed cache finds"
        )
    tied = [c for c in fitting if c.kl[1] <= min(c.kl[1] for c in fitting) + TIE]
    if len(tied) == 1:
        return f"the smallest KL of the {len(fitting)} settings that fit and are good enough"
    return (
        f"{len(fitting)} settings fit and are good enough; of the {len(tied)} within {TIE} nats of the smallest KL it "
        "is the fastest"
    )


def _most(needed: Callable[[int], int], room: int) -> int:
    """The most tokens whose bytes fit; 0 for none."""
    low, high = 0, LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= room else (low, middle - 1)
    return low


def _extrapolates(shape: Shape, used: Sequence[Comparison], itself: bool, context: int) -> tuple[str, ...]:
    """What of the advice no measurement covers."""
    told = []
    if not itself:
        names = ", ".join(f"{t.model.name} ({t.model.parameters / 1e6:,.0f}M parameters)" for t in used)
        told.append(f"another model: {shape.name} was not measured; the figures are of {names}")
        if shape.parameters > (largest := max(t.model.parameters for t in used)):
            told.append(
                f"a larger model: {shape.parameters / largest:,.1f} times the parameters of the largest measured"
            )
        if shape.head_dim not in (heads := sorted({t.model.head_dim for t in used})):
            told.append(f"other heads: of {shape.head_dim} numbers, measured with {' and '.join(map(str, heads))}")
    if context > (longest := max(t.ctx for t in used)):
        told.append(f"a longer context: {context:,} tokens, measured with {longest:,}")
    if shape.most is not None and context > shape.most:
        told.append(f"beyond the {shape.most:,} tokens that the model was made for")
    return tuple(told)
