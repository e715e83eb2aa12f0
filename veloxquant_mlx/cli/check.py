"""``veloxquant check``: a configuration against bounds, for continuous integration."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ..cache.base import KVCacheBuilder
from ..core.exceptions import CacheInputError, QuantizerConfigError
from ..core.text import kl
from .generate import load

if TYPE_CHECKING:
    from ..quality.plans import Plan
    from ..quality.results import Row, Uncompressed


@dataclass(frozen=True)
class Bound:
    """What was measured of ``name`` against ``limit``; ``found`` None: it could not be measured."""

    name: str
    found: float | None
    limit: float
    least: bool
    remark: str = ""

    @property
    def met(self) -> bool:
        if self.found is None:
            return False
        return self.found >= self.limit if self.least else self.found <= self.limit

    def told(self) -> Text:
        form = kl if "KL" in self.name else lambda value: f"{value:.4g}"
        found = "not measured" if self.found is None else form(self.found)
        line = f"{self.name:<18} {found:>12}   at {'least' if self.least else 'most'} {self.limit:g}"
        mark = Text("ok    ", "green") if self.met else Text("FAIL  ", "bold red")
        return mark + Text(line) + Text(f"   ({self.remark})" if self.remark else "", "dim")


def check(
    model: Annotated[str, typer.Option(help="Folder of an mlx_lm model, or the name of a repository.")],
    config: Annotated[
        Path, typer.Option(help="JSON file: method and fields, a list of two, or a row of results.json.")
    ],
    max_kl: Annotated[float | None, typer.Option(min=0, help="Most mean KL, in nats.")] = None,
    max_p99_kl: Annotated[float | None, typer.Option(min=0, help="Most KL of all but 1 % of the predictions.")] = None,
    max_flips: Annotated[
        float | None, typer.Option(min=0, max=1, help="Most first choices that change (0..1).")
    ] = None,
    max_perplexity: Annotated[float | None, typer.Option(min=0, help="Most perplexity, relative.")] = None,
    min_needle: Annotated[float | None, typer.Option(min=0, max=1, help="Fewest planted facts found (0..1).")] = None,
    min_copy: Annotated[float | None, typer.Option(min=0, help="Least of a sequence copied, relative.")] = None,
    min_ratio: Annotated[float | None, typer.Option(min=0, help="How many times smaller at least.")] = None,
    text: Annotated[str, typer.Option(help="Text file (UTF-8) to read, or built-in.")] = "built-in",
    ctx: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 1024,
    scored: Annotated[int, typer.Option(min=2, help="Tokens after the prompt whose predictions are compared.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of needles and random sequences.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print bounds and figures as JSON.")] = False,
) -> None:
    """Check that a configuration is good enough on a model: a quality gate for CI.

    Exits with 0 if every bound is met, with 1 if one is missed or the method
    fails, with 2 if it cannot be used that way.

    Example: veloxquant check --model ./my-model --config kv.json --max-kl 0.05
    """
    from ..quality import compare, probes
    from .calibrate import read_text
    from .main import err, out

    limits = {
        "mean KL": (max_kl, False),
        "p99 KL": (max_p99_kl, False),
        "flips": (max_flips, False),
        "perplexity ratio": (max_perplexity, False),
        "needles found": (min_needle, True),
        "copied": (min_copy, True),
        "x smaller": (min_ratio, True),
    }
    if all(limit is None for limit, _ in limits.values()):
        raise QuantizerConfigError("check needs a bound, such as --max-kl 0.05 or --min-needle 0.9. Give at least one.")
    plan, words = read_plan(config), read_text(text)
    made = plan.config()
    with err.status(f"loading {model}"):
        loaded, tokenizer = load(model)
    KVCacheBuilder.for_model(loaded, made, serve_standalone=True)  # what cannot be used is no failure of a bound
    keys = () if min_needle is None and min_copy is None else probes.KEYS
    if keys:
        probes.build(tokenizer, words, ctx, seed=seed)
    with err.status(f"measuring {plan.label}") as status:
        found = compare(
            loaded,
            tokenizer,
            [plan],
            words,
            ctx=ctx,
            scored=scored,
            seed=seed,
            keys=keys,
            progress=lambda label, done, total: status.update(f"measuring {label}: {done} of {total} tokens"),
        )
    (row,), plain = found.rows, found.uncompressed
    assert plain is not None
    bounds = [
        Bound(name, figure, limit, least, remark)
        for (name, (limit, least)), (figure, remark) in zip(limits.items(), figures(row, plain), strict=True)
        if limit is not None
    ]
    passed = row.error is None and all(bound.met for bound in bounds)
    if as_json:
        told = [dataclasses.asdict(bound) | {"met": bound.met} for bound in bounds]
        out.print_json(json.dumps({"passed": passed, "bounds": told, "row": dataclasses.asdict(row)}))
    elif row.error is not None:
        out.print(Text("FAIL  ", "bold red") + Text(f"{plan.label}: {row.error}"), soft_wrap=True)
    else:
        out.print(f"{plan.label}: {ctx} tokens of prompt, {scored} predictions", markup=False, soft_wrap=True)
        for bound in bounds:
            out.print(bound.told(), soft_wrap=True)
    if not passed:
        raise typer.Exit(1)


def figures(row: Row, plain: Uncompressed) -> list[tuple[float | None, str]]:
    """Figures in the order of the bounds, with what a reader should know about one."""
    own = "" if plain.needle is None else f"the uncompressed cache finds {plain.needle.mean:.4g}"
    copies = "the uncompressed cache copies nothing" if plain.copy == 0 else ""
    return [
        (row.mean_kl, ""),
        (row.p99_kl, ""),
        (row.top1_flips, ""),
        (row.perplexity_ratio, ""),
        (None if row.needle is None else row.needle.mean, own),
        (row.copy, copies),
        (row.ratio, ""),
    ]


def read_plan(path: Path) -> Plan:
    """The configuration in a JSON file; ``CacheInputError`` where there is none."""
    from ..quality.plans import Plan

    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CacheInputError(f"--config {str(path)!r} cannot be read ({error}). Give a JSON file.") from error
    parts: list[Any] = told if isinstance(told, list) else [told]
    if not 1 <= len(parts) <= 2 or not all(isinstance(p, dict) and isinstance(p.get("method"), str) for p in parts):
        raise CacheInputError(
            f"--config {str(path)!r} cannot be used: it must hold an object with a method, or a list of two. "
            'Such as {"method": "kivi", "bit_width_inlier": 4}.'
        )
    if len(parts) == 1 and isinstance(parts[0].get("fields"), dict):  # a row of results
        return Plan(str(parts[0].get("label", parts[0]["method"])), parts[0]["method"], parts[0]["fields"])
    name = "+".join(part["method"] for part in parts)
    fields: dict[str, Any] = {}
    for key, value in (item for part in parts for item in part.items() if item[0] != "method"):
        if fields.setdefault(key, value) != value:
            raise CacheInputError(f"--config {str(path)!r} cannot be used: {key} has two values. Set it once.")
    settings = ", ".join(f"{key}={value!r}" for key, value in fields.items())
    return Plan(f"{name} ({settings})" if settings else name, name, fields)
