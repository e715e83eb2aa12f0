"""Decode attention over packed rows in kernels: shares of the rows in parallel, then one sum (``decode.h``)."""

from __future__ import annotations

from functools import lru_cache
from math import log
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from . import launch, tensor
from .launch import Output, Program
from .sides import KINDS, Form, Side

if TYPE_CHECKING:
    from ...cache.store import Store
    from ..masks import Mask

MASKS = ("OPEN", "CAUSAL", "BOOLEAN", "ADDITIVE")
WARPS = 4  # groups of 32 lanes that work together
ROWS = 8  # query rows whose sums a group of lanes holds
TEAM = 8  # groups of 32 lanes that make one row of the result where that is a launch of its own
CHAINS = 16  # launches of one plan that may run side by side
GROUPS = 1056  # groups of lanes that a call is split into: enough for the largest GPUs
SHARE = 256  # rows below which a share is not worth a group
LOG2E = 1 / log(2)


class Call(NamedTuple):
    """What programs are made for: ``rows`` query rows of ``length`` tokens for each of ``groups`` kv heads.

    ``dtype`` is that of queries and output, ``dtypes`` are those of all other arrays that may have several.
    """

    keys: Form
    values: Form
    groups: int
    heads: int
    rows: int
    length: int
    dim: int
    value_dim: int
    mask: int
    sinks: bool
    dtype: mx.Dtype
    tensor: bool
    same_table: bool
    joined: bool
    dtypes: tuple[mx.Dtype | None, ...]


@lru_cache(maxsize=512)
def _programs(call: Call) -> tuple[Program, ...]:
    """The program that takes the shares, and the one that sums them where that is not ``joined`` to it."""
    held = min(call.rows, ROWS)
    shape: dict[str, int | str] = {
        "ALL_HEADS": call.groups,
        "ALL_ROWS": call.rows,
        "LENGTH": call.length,
        "DV": call.value_dim,
    }
    shape["SLOTS"] = -(-call.value_dim // 32)
    # One array for sums, largest scores and weights: each output costs MLX half a microsecond or more.
    shape |= {"SHARE_ROWS": f"(size_t(counts[14] + counts[15] + counts[16]) * {call.groups * call.rows})"}
    shape |= {"part_top": "(part + SHARE_ROWS * DV)", "part_weight": "(part_top + SHARE_ROWS)"}
    defines: dict[str, int | str] = {name: i for i, name in enumerate(KINDS)}
    defines |= {name: i for i, name in enumerate(MASKS)} | shape | {"WARPS": WARPS}
    defines |= call.keys.defines("K") | call.values.defines("V")
    defines |= {"KEYS": KINDS.index(call.keys.kind.upper()), "VALUES": KINDS.index(call.values.kind.upper())}
    defines |= {"MASK": call.mask, "HEADS": call.heads, "ROWS": held, "D": call.dim}
    defines |= {"DT": call.keys.dim or call.dim, "TURNED": int(call.keys.turned > 0), "SKETCH": call.keys.sketch}
    defines |= {"QUERY_SIGNS": int(call.keys.turned == 2), "QUERY_NORM": _norm(call.keys.dim)}
    # in the order of ``Plan``
    inputs = ["counts", "scale", "q", *(["mask"] if call.mask > 1 else [])]
    inputs += [("qt", "q_signs")[call.keys.turned - 1]] if call.keys.turned else []
    inputs += ["qs"] if call.keys.sketch else []
    names = (*inputs, *call.keys.names("k"), *call.values.names("v"))
    outputs = ("part",)
    name, body, headers, shared = "decode", '{\n#include "decode.h"\n}\n', ("readers.h",), 0
    if call.tensor:
        name, headers = "tensor", tensor.HEADERS
        defines |= tensor.defines(call.keys, call.values, call.rows, call.same_table)
        shared = tensor.shared_bytes(call.keys, call.values, defines, call.rows, WARPS)
        body = f'if (GROUP_X < counts[16]) {{\nif (GROUP_Z == 0) {{\n#include "tensor.h"\n}}\n}} else {body}'

    ends: dict[str, int | str] = {"QUERY_HEADS": call.heads * call.rows // call.length, "SINKS": int(call.sinks)}
    ends |= {"SPLIT": int(call.values.turned == 1), "OUT_SIGNS": int(call.values.turned == 2)}
    ends |= {"OUT_NORM": _norm(call.value_dim), "OUT": str(call.dtype).removeprefix("mlx.core.").upper()}
    also = (*(("sinks",) if call.sinks else ()), *(("out_signs",) if call.values.turned == 2 else ()))
    results = ("of_codes", "of_floats") if call.values.turned == 1 else ("out",)
    if not call.joined:
        shares = Program(name, body, defines, names, outputs, WARPS, headers, shared)
        ends |= shape | {"TEAM": TEAM, "MEMBER": "WARP"}
        body = 'const int row = GROUP_Y;\n#include "combine.h"\n'
        return shares, Program("combine", body, ends, (*outputs, "counts", *also), results, TEAM)
    # A group of lanes has as many rows as there are: a warp for each of them.
    defines |= ends | {"TEAM": 1, "MEMBER": 0, "OTHERS": _others(call.rows)}
    body += '#include "last.h"\nfor (int r = WARP; r < ALL_ROWS; r += WARPS) {\n'
    body += 'const int row = GROUP_Y * ALL_ROWS + r;\n#include "combine.h"\n}\n'
    names, outputs = (*names, "tickets", *also), (*outputs, "next_tickets", *results)
    return (Program(name, body, defines, names, outputs, WARPS, headers, shared),)


@lru_cache
def _constants(numbers: tuple[int, ...]) -> mx.array:
    return mx.array(numbers, mx.int32)


def attention(
    keys: Side,
    values: Side,
    q: mx.array,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    n: int,
    half: bool = True,
) -> mx.array:
    """Attention of ``q`` ``(B, Hq, L, D)`` over the ``n`` rows of a store (``sides``), in q's dtype.

    With ``half`` the products may be made by tensor cores, in half precision.
    """
    return Plan(keys, values, q, mask, sinks, half)(q, scale, mask, sinks, n)


class Plan:
    """Attention by calls of one kind over a store that grows: what does not change from token to token."""

    def __init__(self, keys: Side, values: Side, q: mx.array, mask: Mask, sinks: mx.array | None, half: bool) -> None:
        self.keys, self.values, self.shape, self.dtype = keys, values, q.shape, q.dtype
        self.kind, self.sinks = _kind(mask), None if sinks is None else sinks.dtype
        self.b, self.hq, self.length, self.dim = q.shape
        self.heads, self.value_dim = keys.stream.heads, values.stream.dim
        self.groups, self.rows = self.b * self.heads, self.hq // self.heads * self.length
        self.others = _others(self.rows)
        # Metal has no order between the groups of lanes of one launch.
        self.joined = launch.backend() == "cuda"
        # Tickets of the latest launches. A launch waits for the one whose tickets it takes; calls that are evaluated
        # together need not wait for each other.
        self.tickets: list[mx.array] = []
        # tensor cores see no masks: the rows that they take are in sight of all queries
        self.fast = (
            half
            and self.rows <= tensor.ROWS
            and not isinstance(mask, mx.array)
            and tensor.readable(keys.form, values.form)
            and self.joined
        )
        # What takes queries into the basis of the codes: a function, or what the kernel does it by.
        codes, self.turns, self.back, self.back_signs = keys.codes, [], None, []
        if codes is not None:
            sketch = None if codes.sketch is None else codes.sketch.on_query
            turns = (codes.on_query if codes.signs is None else codes.signs, sketch)
            self.turns = [turn for turn in turns if turn is not None]
        if values.codes is not None and (signs := values.codes.signs) is not None:
            self.back_signs = [signs]
        elif values.codes is not None:
            self.back = values.codes.from_mix
        same = codes is not None and values.codes is not None and codes.table is values.codes.table
        size = (self.groups, self.heads, self.rows, self.length, self.dim, self.value_dim)
        dtypes = (self.kind[1], self.sinks, *(a.dtype for a in (*keys.arrays(), *values.arrays())))
        call = Call(
            keys.form, values.form, *size, self.kind[0], sinks is not None, q.dtype, False, same, self.joined, dtypes
        )
        self.programs = [_programs(call._replace(tensor=fast)) for fast in (False, True)[: 1 + self.fast]]
        self.scales: dict[float, mx.array] = {}

    def fits(self, store: Store, q: mx.array, mask: Mask, sinks: mx.array | None) -> bool:
        """Whether the plan is for a call like this on ``store`` as it is now."""
        keys, values = self.keys, self.values
        return (
            keys.stream is store.keys
            and values.stream is store.values
            and q.shape == self.shape
            and q.dtype == self.dtype
            and _kind(mask) == self.kind
            and (None if sinks is None else sinks.dtype) == self.sinks
            and keys.holds()
            and values.holds()
        )

    def __call__(self, q: mx.array, scale: float, mask: Mask, sinks: mx.array | None, n: int) -> mx.array:
        """Attention over all ``n`` rows that the store holds now."""
        keys, values, groups, rows, length = self.keys, self.values, self.groups, self.rows, self.length
        key_first, key_stop, first, stop = keys.first, keys.stop, values.first, values.stop
        low, high, steps = first, min(key_stop, stop, n - length + 1), (0, 0, 0)
        fast = self.fast and key_first == low and high - low >= tensor.LEAST
        if not fast:
            high = low
        scaled = self.scales.get(scale)
        if scaled is None:
            scaled = self.scales[scale] = mx.array([scale * LOG2E], mx.float32)
        inputs = [scaled, q]
        if isinstance(mask, mx.array):
            mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
            if mask.shape[1] not in (1, self.hq):  # one per kv head
                mask = mx.repeat(mask, self.hq // self.heads, axis=1)
            steps = _strides(mask)
            inputs.append(mask)
        for turn in self.turns:
            by_signs = isinstance(turn, mx.array)
            inputs.append(turn if by_signs else turn(q.reshape(self.b, self.heads, rows, self.dim)))
        of_float = n - stop + first
        split = tensor.shares(high - low, groups, WARPS) if fast else 0
        coded, plain = (_shares(count, groups * self.others) for count in (n - of_float - high + low, of_float))
        plain += not (split or coded or plain)  # there is always one, if of no rows
        (k_room, k_sinks, k_tail), (v_room, v_sinks, v_tail) = keys.room(), values.room()
        spans = (n, n - length, key_first, key_stop, first, stop, low, high)
        counts = _constants((*spans, k_room, v_room, k_sinks, v_sinks, k_tail, v_tail, coded, plain, split, *steps))
        total = split + coded + plain
        main, *ends = self.programs[fast]
        width, dtype = self.value_dim, mx.float32
        outputs: list[Output] = [((total * groups * rows * (width + 2),), dtype)]
        inputs = [counts, *inputs, *keys.arrays(), *values.arrays()]
        also = [*([] if sinks is None else [sinks]), *self.back_signs]
        shape = (*self.shape[:3], width)
        wanted: list[Output] = [(shape, self.dtype)]
        if self.back is not None:
            wanted = [((self.b, self.heads, rows, width), dtype)] * 2
        if ends:
            parts = launch.run(main, inputs, outputs, (total, groups, self.others))
            made = launch.run(ends[0], [*parts, counts, *also], wanted, (1, groups * rows, 1))
        else:
            outputs += [((groups,), mx.uint32), *wanted]
            known = len(self.tickets) == CHAINS
            inputs += [self.tickets.pop(0) if known else mx.zeros(groups, mx.uint32), *also]
            made = launch.run(main, inputs, outputs, (total, groups, self.others))[1:]
            self.tickets.append(made.pop(0))
        if self.back is None:
            return made[0]
        return (self.back(made[0]) + made[1]).astype(self.dtype).reshape(shape)


def _norm(dim: int) -> str:
    """What makes the Hadamard transform of ``dim`` numbers orthonormal."""
    return f"{max(dim, 1) ** -0.5!r}f"


def _kind(mask: Mask) -> tuple[int, mx.Dtype | None]:
    """The number of the mask in ``MASKS``, and the dtype of its numbers."""
    if isinstance(mask, mx.array):
        return (2 if mask.dtype == mx.bool_ else 3), mask.dtype
    return (0 if mask is None else 1), None


def _others(rows: int) -> int:
    """Groups of lanes that take the query rows of a kv head."""
    return -(-rows // ROWS) if rows > ROWS else 1


def _shares(rows: int, others: int) -> int:
    """Shares that ``rows`` are split into where ``others`` groups run beside each."""
    return min(-(-rows // SHARE), max(1, GROUPS // others))


def _strides(mask: mx.array) -> tuple[int, ...]:
    """Steps from sequence to sequence, head to head, query row to query row in a mask; 0 where there is only one."""
    _, heads, rows, columns = mask.shape
    steps = (heads * rows * columns, rows * columns, columns)
    return tuple(0 if n == 1 else step for n, step in zip(mask.shape, steps, strict=False))
