"""``veloxquant compare``: what methods cost and save on a model and a text, as a table and as files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..core.exceptions import CacheInputError, QuantizerConfigError
from ..core.text import kl, size
from ..methods._method import refuse
from .generate import load

if TYPE_CHECKING:
    from ..quality.results import Comparison, Row

WIDE = 108  # columns from which the table has all figures
FEW = 8  # rows up to which their notes are printed
JSON, CSV, HTML = "results.json", "results.csv", "report.html"


def compare(
    model: Annotated[str, typer.Option(help="Folder of an mlx_lm model, or the name of a repository.")],
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas; pairs as in snapkv+kivi. Default: a short choice.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="Families of methods, separated by commas.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every method.")] = False,
    text: Annotated[str, typer.Option(help="Text file (UTF-8) to read, or built-in.")] = "built-in",
    ctx: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 1024,
    bits: Annotated[
        str | None, typer.Option(help="Widths such as 4,3,2: a further row for each, of methods that have one.")
    ] = None,
    scored: Annotated[int, typer.Option(min=2, help="Tokens after the prompt whose predictions are compared.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of needles and random sequences.")] = 0,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for results.json, results.csv and report.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure what each method costs and saves on a model: bytes, KL, needles, copying, speed.

    One text is read with the model's own cache and with every method. A method
    that fails is a row with its error. With --out every row is written when it
    is ready, and the same command goes on where a run was broken off.

    Example: veloxquant compare --model ./my-model --all --ctx 1024 --out results
    """
    from ..quality.plans import plans
    from .calibrate import BUILT_IN, read_text
    from .main import err, out

    if every and (methods is not None or family is not None):
        raise QuantizerConfigError("--all cannot be used with --methods or --family. Leave one out.")
    chosen = plans(listed(methods), listed(family), every, widths(bits))
    words, before = read_text(text), earlier(out_folder)
    with err.status(f"loading {model}"):
        loaded, tokenizer = load(model)
    about = {"name": Path(model).name, "text_name": text if text == BUILT_IN else Path(text).name}
    settings = {"ctx": ctx, "scored": scored, "seed": seed, "before": before, **about}
    found = _measured(loaded, tokenizer, chosen, words, settings, out_folder, err)
    mine = [row for plan in chosen for row in found.rows if (row.label, row.method) == (plan.label, plan.method)]
    if as_json:
        out.print(found.to_json(), markup=False, soft_wrap=True, end="")
    else:
        show(found, mine, out)
    if out_folder is not None:
        report(found, out_folder, err)
    if all(row.error for row in mine):
        raise typer.Exit(1)


def listed(text: str | None) -> list[str]:
    """The names of an option, separated by commas."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def widths(text: str | None) -> list[int]:
    """The numbers of ``--bits``."""
    try:
        return [int(part) for part in listed(text)]
    except ValueError:
        refuse("--bits", text, "whole numbers with commas between them", "Such as 4,3,2.")


def earlier(folder: Path | None) -> Comparison | None:
    """The results in ``folder``, which is made where it is not there."""
    from ..quality.results import Comparison

    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheInputError(f"--out {str(folder)!r} cannot be used ({error}). Give a folder.") from error
    return Comparison.load(folder / JSON) if (folder / JSON).exists() else None


def _measured(
    model: Any,
    tokenizer: Any,
    chosen: Sequence[Any],
    text: str,
    settings: dict[str, Any],
    folder: Path | None,
    err: Console,
) -> Comparison:
    """Measure with bars on ``err``, a line for every row that is ready, and files that are always whole."""
    from ..quality.compare import compare as measure

    columns = (
        TextColumn("{task.description:<26.26}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[of]}"),
    )
    began = time.perf_counter()
    with Progress(*columns, TimeElapsedColumn(), console=err) as bars:
        rows, tokens = bars.add_task("rows", total=len(chosen), of="rows"), bars.add_task("", total=None, of="tokens")

        def progress(label: str, done: int, total: int) -> None:
            if bars.tasks[tokens].description != label:
                bars.reset(tokens, description=label, total=total)
            bars.update(tokens, completed=done)

        def done(now: Comparison) -> None:
            if folder is not None:
                save(now, folder)
            bars.advance(rows)
            bars.console.print(line(now.rows[-1]), soft_wrap=True)

        before = settings["before"]
        if before is not None:
            ready = {(row.label, row.method) for row in before.rows if row.error is None}
            old = sum((plan.label, plan.method) in ready for plan in chosen)
            bars.console.print(f"{old} of {len(chosen)} rows are in {folder} already", soft_wrap=True)
            bars.update(rows, completed=old)
        try:
            found = measure(model, tokenizer, chosen, text, progress=progress, done=done, **settings)
        except KeyboardInterrupt:
            bars.stop()
            kept = f"The rows so far are in {folder}: the same command goes on." if folder else "Nothing was kept."
            err.print(f"stopped. {kept}", soft_wrap=True)
            raise typer.Exit(130) from None
        bars.update(tokens, visible=False)
    err.print(f"[dim]done in {time.perf_counter() - began:.0f} s[/]")
    return found


def save(found: Comparison, folder: Path) -> None:
    """Write JSON and CSV, each whole or not at all."""
    from ..quality.results import write

    write(folder / JSON, found.to_json())
    write(folder / CSV, found.to_csv())


def report(found: Comparison, folder: Path, err: Console) -> None:
    """Write the files, with the report where it can be drawn."""
    from ..quality.results import write

    save(found, folder)
    written = [JSON, CSV]
    try:
        from ..quality.report import html

        write(folder / HTML, html(found))
        written.append(HTML)
    except ImportError as error:
        err.print(f"[yellow]note:[/] no {HTML}: {escape(str(error))}", soft_wrap=True)
    err.print(f"wrote {', '.join(written)} to {folder}", markup=False, soft_wrap=True)


def line(row: Row) -> Text:
    """A row in few words, as soon as it is ready."""
    name = Text(f"{row.label:<26} ", "bold")
    if row.error is not None:
        return name + Text(f"failed: {row.error}", "red")
    needle = "" if row.needle is None else f"  needles {row.needle.mean:.0%}"
    return name + Text(f"{row.ratio or 0:.2f}x smaller  KL {kl(row.mean_kl)}{needle}  {row.seconds:.0f} s")


def _cell(value: float | None, form: str, end: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{end}"


def show(found: Comparison, rows: Sequence[Row], out: Console) -> None:
    """The table, what its columns mean, and what rows have to say; at 80 columns without the wider figures."""
    ready = sorted((row for row in rows if row.error is None), key=lambda row: row.ratio or 0)
    out.print(table(found, ready, out.width >= WIDE))
    for row in rows:
        if row.error is not None:
            out.print(Text(f"{row.label}: ", "bold") + Text(row.error, "red"))
    out.print()
    for text in explained(found, ready, out.width >= WIDE):
        out.print(Text(text, "dim"))


def table(found: Comparison, rows: Sequence[Row], wide: bool) -> Table:
    """Rows that were measured, the uncompressed cache first."""
    from ..quality.results import front

    view = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", padding=(0, int(wide), 0, 0))
    view.add_column("method", overflow="fold")
    view.add_column("", no_wrap=True)
    heads = ["bits", "smaller", "mean KL", "flips", "ppl", "needle", "copy", "speed"]
    for name in [*heads, *(["held", "p99 KL", "peak"] if wide else [])]:
        view.add_column(name, justify="right", no_wrap=True)
    best, first = {id(row) for row in front(rows)}, found.uncompressed
    if first is not None:
        needle, copies = first.needle and first.needle.mean, 1.0 if first.copy else None
        plain = ["16.00", "1.00x", "0", "0%", "1.00", _cell(needle, ".0%"), _cell(copies, ".0%"), "1.00x"]
        whole = next((row.bytes_16 for row in rows if row.bytes_16), None)
        view.add_row(
            "uncompressed, 16 bits", "", *plain, *([size(whole) if whole else "-", "0", "1.00x"] if wide else [])
        )
    for row in rows:
        more = [size(row.nbytes or 0), kl(row.p99_kl), _cell(row.prefill_peak, ".2f", "x")]
        view.add_row(
            Text(row.label, "bold" if id(row) in best else ""),
            "*" if id(row) in best else "",
            _cell(row.bits, ".2f"),
            _cell(row.ratio, ".2f", "x"),
            kl(row.mean_kl),
            _cell(row.top1_flips, ".0%"),
            _cell(row.perplexity_ratio, ".3g" if (row.perplexity_ratio or 0) >= 10 else ".2f"),
            _cell(row.needle and row.needle.mean, ".0%"),
            _cell(row.copy, ".0%"),
            _cell(row.decode_speed, ".2f", "x"),
            *(more if wide else []),
        )
    return view


def explained(found: Comparison, rows: Sequence[Row], wide: bool) -> list[str]:
    """What a reader needs to judge the figures."""
    first, lines = found.uncompressed, []
    lines.append(
        f"{found.model.name}, {found.text.name}: {found.ctx} tokens of prompt, {found.scored} predictions compared. "
        f"{found.machine}."
    )
    lines.append("* no other row holds fewer bytes at a smaller KL. bits: held per number, everything counted.")
    lines.append(
        "smaller: than 16-bit keys and values. mean KL in nats, flips of the first choice and ppl (perplexity ratio): "
        "against the uncompressed cache."
    )
    if first is not None and first.needle is not None:
        count = sum(len(depth) for length in first.needle.score for depth in length)
        lines.append(
            f"needle: of {count} planted facts, asked for after the prompt. copy: of a random sequence, against the "
            f"uncompressed cache ({_cell(first.copy, '.0%')}). speed: of single steps."
        )
    if wide:
        lines.append(
            "held: bytes of all arrays. peak: growth of memory over the prompt, against the uncompressed cache."
        )
    if len(rows) <= FEW:
        lines += [f"{row.label}: {note}" for row in rows for note in row.notes]
    elif any(row.notes for row in rows):
        lines.append(f"Notes of rows are in {JSON} (--out) and in --json.")
    return lines
