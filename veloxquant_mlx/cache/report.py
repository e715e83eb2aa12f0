"""The receipt: what was asked, what was done, and what is really held, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.text import size
from ..models.inspect import NATIVE_REASONS
from .batch import CompressedBatchCache
from .layer import CompressedKVCache
from .rest import AtRest
from .rest import at_rest as at_rest_of


@dataclass(frozen=True)
class LayerReceipt:
    """One entry of the cache list; a batch is the sum of its sequences.

    ``packed``, ``window``, ``index`` and ``fixed`` are bytes held: codes and their parameters; float rows; positions
    and what a policy remembers; constants such as rotations and tables. ``uncompressed`` is what 16-bit keys and
    values of the same tokens take.
    """

    method: str
    tokens: int
    rows: int
    packed: int
    window: int
    index: int
    fixed: int
    uncompressed: int
    attention: tuple[str, ...]
    notes: tuple[str, ...]
    at_rest: AtRest | None = field(default=None, compare=False)  # layers that differ in it alone share a line

    @property
    def nbytes(self) -> int:
        return self.packed + self.window + self.index + self.fixed


@dataclass(frozen=True)
class CacheReport:
    """The receipts of a cache list; ``str()`` is a readable table."""

    layers: tuple[LayerReceipt, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def uncompressed(self) -> int:
        """Bytes of 16-bit keys and values for the tokens seen, over the layers whose size is known."""
        return sum(layer.uncompressed for layer in self.layers)

    @property
    def at_rest(self) -> AtRest | None:
        """What a file of all layers takes; None where that was not asked."""
        return _at_rest(self.layers)

    @property
    def ratio(self) -> float:
        """How many times smaller than 16-bit: from bytes held, never from bit widths. 1.0 for empty caches."""
        ours = [layer for layer in self.layers if layer.uncompressed]
        held = sum(layer.nbytes for layer in ours)
        return sum(layer.uncompressed for layer in ours) / held if held else 1.0

    def __str__(self) -> str:
        if not self.layers:
            return "no caches"
        head = ("layers", "method", "tokens", "rows", "packed", "window", "index", "fixed", "x smaller", "attention")
        rows: list[tuple[str, ...]] = [head]
        for first, last, layer in _runs(self.layers):
            ratio = f"{layer.uncompressed / layer.nbytes:.2f}" if layer.uncompressed and layer.nbytes else "-"
            span = str(first) if first == last else f"{first}-{last}"
            sizes = (size(n) for n in (layer.packed, layer.window, layer.index, layer.fixed))
            how = "; ".join(layer.attention)
            rows.append((span, layer.method, str(layer.tokens), str(layer.rows), *sizes, ratio, how))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        notes = dict.fromkeys(note for layer in self.layers for note in layer.notes)
        lines += [f"note: {note}" for note in notes]
        if not any(layer.uncompressed for layer in self.layers):
            return "\n".join(
                [*lines, f"held {size(self.nbytes)} in {len(self.layers)} layers; nothing is compressed yet"]
            )
        lines.append(
            f"held {size(self.nbytes)} in {len(self.layers)} layers; compressed layers are {self.ratio:.2f}x smaller "
            "than 16-bit keys and values of the same tokens"
        )
        if rest := self.at_rest:
            line = f"at rest {size(rest.nbytes)}, as save_cache writes it"
            if rest.coded:
                bound = f"the empirical entropy of their codes, a bound that is not reached, is {size(rest.entropy)}"
                line += f"; {size(rest.coded)} of that are entropy-coded bytes with their tables ({bound})"
            lines.append(line)
        return "\n".join(lines)


def cache_report(caches: Sequence[Any], at_rest: bool = False) -> CacheReport:
    """The receipt of a list of caches, one entry per cache, batches and those of mlx_lm included.

    With ``at_rest`` everything is encoded as ``save_cache`` would, to say what a file takes; that needs its time.
    A constant that several layers share is counted once, at the first of them; each cache's own ``nbytes`` has it in.
    """
    counted: set[int] = set()
    return CacheReport(tuple(_receipt(cache, counted, at_rest) for cache in caches))


def _receipt(cache: Any, counted: set[int], rest: bool) -> LayerReceipt:
    if isinstance(cache, CompressedKVCache):
        seen = cache.describe()
        constants = cache.constants()
        seen["bytes"]["fixed"] -= sum(a.nbytes for a in constants if id(a) in counted)
        counted.update(id(a) for a in constants)
        return LayerReceipt(
            method=seen["method"],
            tokens=seen["tokens"],
            rows=seen["rows"],
            **seen["bytes"],
            uncompressed=2 * seen["elements"],
            attention=tuple(seen["attention"]),
            notes=tuple(seen["notes"]),
            at_rest=at_rest_of(cache) if rest else None,
        )
    if isinstance(cache, CompressedBatchCache):
        return _joined([_receipt(row, counted, rest) for row in cache.rows])
    name = type(cache).__name__
    tokens = cache.size() if hasattr(cache, "size") else 0
    plain = "uncompressed: the model's own cache" if name == "KVCache" else f"{name}: left to the model"
    reason = getattr(cache, "left_alone", None) or NATIVE_REASONS.get(name, plain)
    held = 0 if cache.empty() else cache.nbytes
    bare = AtRest(held, 0, 0) if rest else None
    return LayerReceipt("-", tokens, tokens, 0, held, 0, 0, 0, (reason,), (), bare)


def _joined(rows: list[LayerReceipt]) -> LayerReceipt:
    """The receipt of a batch: everything summed over its sequences."""

    def union(texts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for part in texts for text in part))

    sums = ("tokens", "rows", "packed", "window", "index", "fixed", "uncompressed")
    return LayerReceipt(
        method=rows[0].method if rows else "-",
        **{name: sum(getattr(row, name) for row in rows) for name in sums},
        attention=union(row.attention for row in rows),
        notes=union(row.notes for row in rows),
        at_rest=_at_rest(rows),
    )


def _at_rest(receipts: Iterable[LayerReceipt]) -> AtRest | None:
    parts = [receipt.at_rest for receipt in receipts if receipt.at_rest is not None]
    return sum(parts, AtRest(0, 0, 0)) if parts else None


def _runs(layers: Sequence[LayerReceipt]) -> list[tuple[int, int, LayerReceipt]]:
    """Equal neighbours as one row: (first, last, receipt)."""
    runs: list[tuple[int, int, LayerReceipt]] = []
    for i, layer in enumerate(layers):
        if runs and runs[-1][2] == layer:
            runs[-1] = (runs[-1][0], i, layer)
        else:
            runs.append((i, i, layer))
    return runs
