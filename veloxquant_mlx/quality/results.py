"""What a comparison of methods found: one JSON file, whatever reads it (reports, tables, recommendations).

Nothing here needs MLX. ``Comparison.from_json(path.read_text())`` reads what ``veloxquant compare --out`` wrote.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.exceptions import ArtifactDamagedError, ArtifactNotFoundError

FORMAT = 1
KINDS = ("packed", "window", "index", "fixed")


@dataclass(frozen=True)
class Model:
    """The model that was measured: ``fingerprint`` is of its weights, ``layers`` those that methods compress.

    ``kv_heads`` and ``head_dim`` are those of the first of these layers.
    """

    name: str
    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    parameters: int


@dataclass(frozen=True)
class Text:
    """The text that was read, all of it: its name, the digest of its UTF-8 bytes and its length in tokens."""

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True)
class Needles:
    """Facts planted in a long text and asked for afterwards; ``score[length][depth][key]`` in 0..1, 1: found.

    ``lengths`` in tokens; ``depths`` from 0, the beginning, to 1; ``keys`` name the kinds of fact.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    keys: tuple[str, ...]
    score: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def mean(self) -> float:
        """Over all lengths, depths and keys."""
        found = [s for length in self.score for depth in length for s in depth]
        return sum(found) / len(found)


@dataclass(frozen=True)
class Row:
    """One method with one setting. A figure is None where it was not measured, all are where ``error`` says why.

    ``method`` joins the two of a pair, as in ``snapkv+kivi``; ``fields`` are those of their configurations that differ
    from the defaults. ``bytes`` are held at the end of the text, by kind (``KINDS``); ``bytes_16`` is what 16-bit keys
    and values of the same tokens take, ``ratio`` the quotient, over all layers of the model; ``bits`` is what is held
    per number over the compressed layers alone. KL in nats; ``top1_flips`` is a share. ``copy`` is the share of a
    repeated random sequence that is predicted right, and ``decode_speed`` and ``prefill_peak`` (growth of memory) are
    speed and bytes, all three relative to the uncompressed cache. ``layer_error`` has one relative error of the
    attention output per compressed layer, with all that earlier layers lost in it (None where a layer hides it).
    """

    label: str
    method: str
    family: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    bytes: Mapping[str, int] | None = None
    bytes_16: int | None = None
    bits: float | None = None
    ratio: float | None = None
    mean_kl: float | None = None
    p99_kl: float | None = None
    top1_flips: float | None = None
    perplexity_ratio: float | None = None
    needle: Needles | None = None
    copy: float | None = None
    decode_speed: float | None = None
    prefill_peak: float | None = None
    layer_error: tuple[float | None, ...] | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int | None:
        """All bytes held."""
        return None if self.bytes is None else sum(self.bytes.values())


@dataclass(frozen=True)
class Uncompressed:
    """What the model does with its own cache; ``copy`` is the share itself, ``decode_speed`` tokens per second."""

    perplexity: float
    needle: Needles | None = None
    copy: float | None = None
    decode_speed: float | None = None
    prefill_peak: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Methods against the uncompressed cache: ``ctx`` tokens of prompt, then ``scored`` predictions compared.

    ``versions`` maps packages to versions, ``machine`` says in a line where it ran.
    """

    model: Model
    text: Text
    ctx: int
    scored: int
    seed: int
    versions: Mapping[str, str]
    machine: str
    uncompressed: Uncompressed | None = None
    rows: tuple[Row, ...] = ()
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps({"format": self.format, **dataclasses.asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """What ``to_json`` gave; ``ArtifactDamagedError`` for anything else."""
        try:
            told = json.loads(text)
            if told["format"] != FORMAT:
                raise ValueError(f"its format is {told['format']!r}")
            return cls(
                **{
                    **told,
                    "model": Model(**told["model"]),
                    "text": Text(**told["text"]),
                    "uncompressed": told["uncompressed"] and _with_needle(Uncompressed, told["uncompressed"]),
                    "rows": tuple(_row(row) for row in told["rows"]),
                }
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactDamagedError(
                f"these results cannot be read ({type(error).__name__}: {error}): they must be what veloxquant compare "
                f"wrote, format {FORMAT}. Measure again."
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """The comparison in the file ``path``."""
        path = Path(path)
        if not path.is_file():
            raise ArtifactNotFoundError(f"there are no results {path}. Make them with: veloxquant compare --out FOLDER")
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (ArtifactDamagedError, UnicodeDecodeError) as error:
            raise ArtifactDamagedError(f"{path}: {error}") from error

    def to_csv(self) -> str:
        """The rows as a table; needles as their mean, the other lists of a row are left to JSON."""
        out = io.StringIO()
        writer = csv.DictWriter(out, [*COLUMNS], lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            plain = {name: getattr(row, name) for name in COLUMNS if hasattr(row, name)}
            kinds = {f"bytes_{kind}": row.bytes and row.bytes[kind] for kind in KINDS}
            needle = None if row.needle is None else row.needle.mean
            writer.writerow({**plain, **kinds, "fields": json.dumps(dict(row.fields)), "needle": needle})
        return out.getvalue()


COLUMNS = (
    "label",
    "method",
    "family",
    "fields",
    "error",
    *(f"bytes_{kind}" for kind in KINDS),
    "bytes_16",
    "bits",
    "ratio",
    "mean_kl",
    "p99_kl",
    "top1_flips",
    "perplexity_ratio",
    "needle",
    "copy",
    "decode_speed",
    "prefill_peak",
    "seconds",
)


def front(rows: Sequence[Row]) -> list[Row]:
    """Those rows of which no other holds fewer bytes at a smaller or equal KL."""
    ready = [row for row in rows if row.error is None and row.mean_kl is not None and row.nbytes is not None]

    def beaten(row: Row) -> bool:
        mine = (row.nbytes, row.mean_kl)
        return any(
            other.nbytes <= mine[0] and other.mean_kl <= mine[1] and (other.nbytes, other.mean_kl) != mine  # type: ignore[operator]
            for other in ready
        )

    return [row for row in ready if not beaten(row)]


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # mkstemp lets nobody else read it
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _row(told: Mapping[str, Any]) -> Row:
    return _with_needle(Row, {**told, "layer_error": _tuple(told["layer_error"]), "notes": tuple(told["notes"])})


def _with_needle(cls: type[Any], told: Mapping[str, Any]) -> Any:
    needle = told["needle"]
    found = needle and Needles(**{name: _tuple(value) for name, value in needle.items()})
    return cls(**{**told, "needle": found})


def _tuple(value: Any) -> Any:
    """Lists, nested ones too, as tuples."""
    return tuple(map(_tuple, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
