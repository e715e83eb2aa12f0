"""``veloxquant calibrate``: bits per layer, or the artifact of a method, measured on a model and a text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..cache.base import KVCacheConfig
from ..core.exceptions import CacheInputError, QuantizerConfigError
from ..methods._method import refuse
from .demo import passage
from .generate import load

BUILT_IN = "built-in"
BITS_TOKENS = 512
SEQUENCE, SEQUENCES = 2048, 20  # what the filters of Q-Filters were made from: positions must be mixed


def read_text(name: str) -> str:
    """The text of a file, or the story that comes with the package."""
    if name == BUILT_IN:
        return passage()
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CacheInputError(f"--text {name!r} cannot be read ({error}). Give a text file in UTF-8.") from error


def parse_choices(text: str | None, name: str, average: float) -> list[int]:
    """``2,3,4`` as a list whose members ``name`` takes as bits; its range must have the average in it."""
    from ..calibrate import CHOICES, valid_bits

    widths = valid_bits(name)
    try:
        choices = sorted({int(part) for part in text.split(",")}) if text else [*filter(widths.accepts, CHOICES)]
    except ValueError:
        choices = []
    if not choices or not all(map(widths.accepts, choices)):
        refuse("--choices", text, f"numbers with commas between them, each {widths.text}", "Such as 2,3,4.")
    if not choices[0] <= average <= choices[-1]:
        refuse("--allocate-bits", average, f"from {choices[0]} to {choices[-1]}", "Change it or --choices.")
    return choices


def allocate(
    name: str,
    config: KVCacheConfig,
    average: float,
    choices: list[int],
    text: str,
    tokens: int | None,
    check: bool,
    as_json: bool,
    out: Console,
    err: Console,
) -> None:
    """Print a list of bits for ``average`` bits and what it should gain; with ``check``, what it does."""
    from ..calibrate import bit_fields, divergences, layer_sensitivity, sequences_of

    words = read_text(text)
    with err.status(f"loading {name}"):
        model, tokenizer = load(name)
    used, *rest = sequences_of(tokenizer, words, tokens or BITS_TOKENS, most=2) or [[]]
    with _bar(err, f"measuring {config.method} on {len(used)} tokens") as tell:
        found = layer_sensitivity(model, used, config, choices=choices, progress=tell)
    bits, blind = found.allocate(average), found.blind(average)
    gain, error = found.gain(bits, blind)
    told: dict[str, Any] = {
        "method": config.method,
        "fields": bit_fields(config.method),
        "bits": found.full(bits),
        "compressed_layers": list(found.indices),
        "average": sum(bits) / len(bits),
        "tokens": len(used),
        "expected_kl": found.predict(bits),
        "expected_kl_uniform": found.predict(blind),
        "expected_gain": gain,
        "standard_error": error,
    }
    if check:
        judged, unseen = (rest or [used])[0], bool(rest)
        with _bar(err, f"checking on {len(judged)} {'other' if unseen else 'of the same'} tokens") as tell:
            lists = [found.full(bits), found.full(blind)]
            kl, kl_blind = divergences(model, judged, config, lists, progress=tell)
        told |= {"measured_kl": kl, "measured_kl_uniform": kl_blind, "measured_on_other_text": unseen}
    if as_json:
        out.print_json(json.dumps(told))
        return
    out.print(code(config, told["bits"]), markup=False, soft_wrap=True)
    out.print()
    for line in explain(told, "uniform" if len(set(blind)) == 1 else "blind"):
        out.print(line, markup=False, soft_wrap=True)


def code(config: KVCacheConfig, bits: list[int]) -> str:
    """The line of Python that uses the bits."""
    from ..calibrate import bit_fields

    names, default = bit_fields(config.method), KVCacheConfig()
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in ("method", *names)}
    changed = {name: value for name, value in fields.items() if value != getattr(default, name)}
    listed = names == ("bit_width_inlier",)
    arguments = {"method": config.method, **({names[0]: bits} if listed else {}), **changed}
    made = f"KVCacheConfig({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    return made if listed else f"veloxquant_mlx.calibrate.for_layers(model, {made}, {bits})"


def explain(told: dict[str, Any], rival: str) -> Iterator[str]:
    """What the figures mean, in a few lines."""
    own, layers = len(told["bits"]) - len(told["compressed_layers"]), len(told["compressed_layers"])
    yield f"{told['average']:.2f} bits on average over {layers} compressed layers."
    if own:
        yield f"Elements of {own} layers that keep the model's own cache are there for the count and have no effect."
    if rival == "blind":
        yield "uniform: no such bits exist here; the same sum, spread without looking at layers, stands for it."
    pairs = [("expected", told["expected_kl"], told["expected_kl_uniform"])]
    if "measured_kl" in told:
        pairs.append(("measured", told["measured_kl"], told["measured_kl_uniform"]))
    for word, kl, other in pairs:
        ratio = f"{other / kl:.2f} times less" if 0 < kl < other else "no gain"
        yield f"{word}: mean KL {kl:.5f} nats, uniform {other:.5f}: {ratio}"
    if told["expected_gain"] < 2 * told["standard_error"]:
        yield "The expected gain is within two standard errors: measure on more --tokens before you rely on it."
    if "measured_kl" in told and not told["measured_on_other_text"]:
        yield "The text is too short to measure on a part that the bits were not chosen on: this is the same part."


def make_artifact(
    name: str, method_name: str, text: str, target: Path, tokens: int | None, out: Console, err: Console
) -> None:
    """Fit what ``method_name`` needs on the text and write it to ``target``."""
    from ..calibrate import CALIBRATORS, fit_artifact, sequences_of

    if method_name not in CALIBRATORS:
        refuse("--method", method_name, f"one of {', '.join(CALIBRATORS)}", "For bits per layer: --allocate-bits.")
    if not target.parent.is_dir():
        refuse("--out", str(target), "a file in a folder that exists", f"Make the folder {target.parent} first.")
    words = read_text(text)
    with err.status(f"loading {name}"):
        model, tokenizer = load(name)
    length = min(SEQUENCE, tokens or SEQUENCE)
    sequences = sequences_of(tokenizer, words, length, most=max(1, (tokens or SEQUENCE * SEQUENCES) // length))
    with _bar(err, f"reading {sum(map(len, sequences))} tokens in {len(sequences)} sequences") as tell:
        artifact, remarks = fit_artifact(model, sequences, method_name, progress=tell)
    artifact.save(target)
    for remark in remarks:
        err.print(f"[yellow]note:[/] {escape(remark)}", soft_wrap=True)
    out.print(f"wrote {target}: {method_name} for {len(artifact.indices)} layers", markup=False, soft_wrap=True)
    out.print(
        f'use: KVCacheConfig(method="{method_name}", store=CalibrationArtifact.load("{target}"))\n'
        f" or: veloxquant generate --method {method_name} --option store={target}",
        markup=False,
        soft_wrap=True,
    )


def refuse_task(bits: float | None, target: Path | None) -> None:
    """Exactly one of the two things that calibrate does must be asked for."""
    if (bits is None) == (target is None):
        raise QuantizerConfigError(
            "calibrate needs one of --allocate-bits AVERAGE (prints bits per layer) and --out FILE (writes what a "
            "method needs, such as --method qfilters). Give exactly one."
        )


@contextmanager
def _bar(err: Console, title: str) -> Iterator[Any]:
    """A progress bar; what it yields is called with tokens done and in all."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task(title)
        yield lambda done, total: progress.update(task, completed=done, total=total)
