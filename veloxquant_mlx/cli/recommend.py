"""``veloxquant recommend``: the method that fits a model, a memory and a context, from measured rows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.text import kl, size
from ..methods._method import refuse
from .generate import location, unloadable

if TYPE_CHECKING:
    from ..quality.recommend import Advice, Choice

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", re.IGNORECASE)
NEEDED = ["config.json", "*.index.json", "hf_quant_config.json"]  # of a repository


def recommend(
    model: Annotated[str, typer.Option(help="Folder of an mlx_lm model, or the name of a repository.")],
    memory: Annotated[str, typer.Option(help="What weights and cache may take, such as 8GB (10^9) or 8GiB (2^30).")],
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")],
    max_kl: Annotated[float, typer.Option(min=0, help="Most mean KL that was measured, in nats.")] = 0.1,
    min_needle: Annotated[
        float, typer.Option(min=0, help="Least share of planted facts, of those found without compression.")
    ] = 0.9,
    results: Annotated[
        list[Path] | None,
        typer.Option(help="results.json of veloxquant compare, in place of the shipped ones. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice as JSON.")] = False,
) -> None:
    """Recommend a method and its settings that fit a memory, from measurements.

    The weights are not loaded. Without --results the tables that ship with the
    package are used: two small models. What is extrapolated is said. Exits with
    1 if nothing fits.

    Example: veloxquant recommend --model ./my-model --memory 8GB --context 32768
    """
    from ..quality.recommend import recommend as choose
    from ..quality.recommend import tables
    from ..quality.results import Comparison
    from ..quality.shape import read_shape
    from .main import err, out

    room = parse_size(memory)
    measured = [Comparison.load(file) for file in results] if results else tables()
    with err.status(f"reading {model}"):
        shape = read_shape(folder(model), Path(model).resolve().name)
    advice = choose(shape, measured, room, context, max_kl=max_kl, min_needle=min_needle)
    if as_json:
        out.print(advice.to_json(), markup=False, soft_wrap=True)
    else:
        show(advice, model, out)
    if advice.best is None:
        raise typer.Exit(1)


def parse_size(text: str) -> int:
    """Bytes of a size with a unit; ``QuantizerConfigError`` for anything else."""
    found = SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        refuse("--memory", text, "a number and a unit, such as 8GB, 7.5GiB or 512MB", "GB is 10^9 bytes, GiB 2^30.")
    step = 1024 if found[3] else 1000
    return int(float(found[1]) * step ** ("KMGT".index(found[2].upper()) + 1))


def folder(name: str) -> Path:
    """The folder of a model; of a repository, one with its configuration alone unless its weights are there too."""
    where = Path(location(name))
    if where.is_dir():
        return where
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=NEEDED))
    except Exception as error:
        raise unloadable(name, error) from error


def show(advice: Advice, model: str, out: Console) -> None:
    """The advice, whole at 80 columns."""

    def say(text: str, style: str = "") -> None:
        out.print(Text(text, style), soft_wrap=False)

    weights, room, whole = map(size, (advice.weights, max(advice.room, 0), advice.uncompressed))
    say(f"{advice.model}: weights {weights}, of {size(advice.memory)} {room} are left for {advice.context:,} tokens.")
    if advice.uncompressed_fits:
        say(
            f"The uncompressed cache fits: {whole}. Compress for a longer context, or for more at the same time.",
            "green",
        )
    elif advice.room > 0:
        say(f"The uncompressed cache does not fit: {whole}. It would at {advice.uncompressed_context:,} tokens.")
    out.print()
    if advice.best is not None:
        best(advice, advice.best, model, out)
    elif advice.room <= 0:
        say("Nothing fits: the weights alone take more than that.", "bold red")
    else:
        say("Nothing fits.", "bold red")
        if advice.smallest is not None:
            one, most = advice.smallest, advice.smallest_context
            need = f"{one.label} needs the least, {size(one.peak)}"
            good = f", but {'; '.join(one.against)}" if one.against else ""
            say(f"{need}{good}. {f'It would fit at {most:,} tokens.' if most else 'It fits at no length.'}")
    if advice.others and advice.room > 0:
        out.print()
        say("Others that fit:" if advice.best else "Also too large:", "bold")
        out.print(table(advice.others))
    out.print()
    for text in advice.extrapolates:
        say(f"extrapolated: {text}.", "yellow")
    for text in advice.notes:
        say(f"note: {text}.")
    say(
        "Bytes are of keys and values, prompt: the most while it is read; activations come on top. KL: the mean in "
        "nats, of several models the highest. Needles: of the planted facts that the uncompressed cache finds.",
        "dim",
    )
    if advice.extrapolates:
        say("Measure before you rely on it: veloxquant compare or veloxquant check.", "dim")


def best(advice: Advice, choice: Choice, model: str, out: Console) -> None:
    """The recommendation, its figures and what to paste."""
    good = not choice.against
    out.print(
        Text("recommended  " if good else "least bad    ", "bold")
        + Text(choice.label, "bold green" if good else "bold red")
    )
    facts: list[tuple[str, str]] = [("why", advice.why)]
    facts += [("against", text) for text in choice.against]
    share = f"{choice.peak / advice.room:.0%} of what is left"
    facts.append(("cache", f"{size(choice.held)}, {advice.uncompressed / choice.held:.2f}x smaller; {share}"))
    facts.append(("mean KL", f"{band(choice)} nats"))
    if choice.needle is not None:
        facts.append(("needles", f"{choice.needle:.0%}"))
    if choice.speed is not None:
        facts.append(("speed", f"{choice.speed:.2f}x of a decoding step, on the measuring machine"))
    facts += [
        ("measured", f"{e.model}: KL {kl(e.kl)} at {e.ctx:,} tokens of the text {e.text!r}, {e.machine}")
        for e in choice.evidence
    ]
    facts += [("note", text) for text in choice.notes]
    view = Table.grid(padding=(0, 2, 0, 0))
    view.add_column(style="dim", no_wrap=True)
    view.add_column(overflow="fold")
    for name, text in facts:
        view.add_row(f"  {name}", Text(text))
    out.print(view)
    out.print()
    out.print(code(choice), markup=False, soft_wrap=True)
    out.print(command(choice, model), markup=False, soft_wrap=True)


def band(choice: Choice) -> str:
    """The lowest and the highest KL."""
    return " .. ".join(dict.fromkeys(kl(value) for value in choice.kl))


def code(choice: Choice) -> str:
    """The configuration as Python, that of ``choice.plan.config()``."""
    from ..cache.registry import shared_out

    names, made = choice.method.split("+"), []
    for name, own in zip(names, shared_out(names, choice.fields), strict=True):
        fields = "".join(f", {key}={value!r}" for key, value in own.items())
        made.append(f"KVCacheConfig(method={name!r}{fields})")
    return made[0] if len(made) == 1 else f"[{', '.join(made)}]"


def command(choice: Choice, model: str) -> str:
    """A command that runs the model that way."""
    options = [word for name, value in choice.fields.items() for word in ("--option", f"{name}={value}")]
    return shlex.join(
        ["veloxquant", "generate", "--model", model, "--method", choice.method, *options, "--prompt", "-"]
    )


def table(choices: tuple[Choice, ...]) -> Table:
    """Choices in few columns."""
    view = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    view.add_column("method", overflow="fold")
    for name in ("cache", "prompt", "KL", "needle", "speed"):
        view.add_column(name, justify="right", no_wrap=True)
    if any(c.against for c in choices):
        view.add_column("against", overflow="fold")
    for c in choices:
        needle = "-" if c.needle is None else f"{c.needle:.0%}"
        speed = "-" if c.speed is None else f"{c.speed:.2f}x"
        cells = [size(c.held), size(c.peak), kl(c.kl[1]), needle, speed, *(["; ".join(c.against)] * bool(c.against))]
        view.add_row(Text(c.label), *cells)
    return view
