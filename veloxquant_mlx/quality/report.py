"""A comparison as one page: what was measured, what the figures mean, all rows, three plots.

The page needs no network and no scripts. It follows the reader's choice of light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from ..core.text import kl, size
from . import plots
from .results import KINDS, Comparison, Row, front

MEANINGS = (
    ("bits", "Bits held per number of the compressed layers at the end of the text: packed data, windows, constants."),
    ("smaller", "How many times less is held than 16-bit keys and values of the same tokens take, over all layers."),
    ("held", "Bytes of all arrays that the caches keep: packed, float windows, indices and what does not grow."),
    ("mean KL", "How far the predictions of the next token are from the uncompressed ones, in nats. 0: the same."),
    ("p99 KL", "The same for the worst percent of the predictions."),
    ("flips", "Share of predictions whose first choice is another token."),
    ("perplexity", "Of the text, relative to the uncompressed cache. 1: as good; more: worse."),
    ("needles", "Share of facts planted in the text that are found afterwards, over all lengths, depths and kinds."),
    (
        "copy",
        "How much of a random sequence is continued right when it comes again, relative to the uncompressed cache.",
    ),
    ("speed", "Of single steps after the prompt, relative. Under 1: slower. It changes from run to run."),
    ("peak", "Growth of memory while the prompt is read, relative. A dash: this back end cannot tell."),
)
HEADS = ("method", "family", *(name for name, _ in MEANINGS))
_FAMILY = ' class="family"'
SAFE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def html(found: Comparison) -> str:
    """The page. Raises ``ImportError`` where matplotlib (extra ``plots``) is missing."""
    good = [row for row in found.rows if row.error is None]
    ordered = sorted(good, key=lambda row: math.inf if row.mean_kl is None else row.mean_kl)
    failed = [row for row in found.rows if row.error is not None]
    name, count = escape(found.model.name), f"{len(good)} {'row' if len(good) == 1 else 'rows'}"
    title = f"Compressed caches of {name}"
    lost = f" {len(failed)} failed." if failed else ""
    style = (files("veloxquant_mlx.quality") / "report.css").read_text(encoding="utf-8")
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{SAFE}">',
        '<link rel="icon" href="data:,">',
        f"<style>{style}</style></head><body><main>",
        f"<h1>{title}</h1>",
        f'<p class="lead">What each method saves and what it costs: {count}, each against the model\'s own cache on '
        f"the same text.{lost}</p>",
        _facts(found),
        *_figure(
            "Cost against bytes",
            "Left is smaller, below is better. The line joins the rows that no other beats in both. Bits are over all "
            "layers. Point at a mark for its name.",
            plots.front_plot(found),
        ),
        "<h2>All rows</h2>",
        "<p>In the order of their mean KL. Bold: no other row holds fewer bytes at a smaller KL. Bars show the figure "
        "itself; those of KL are logarithmic.</p>",
        _table(found, ordered, failed),
        "<h2>What the figures mean</h2>",
        '<dl class="meaning">' + "".join(f"<dt>{dt}</dt><dd>{dd}</dd>" for dt, dd in MEANINGS) + "</dl>",
        "<p>Read more than one. KL on a text says little about one fact in its middle, needles say little about the "
        "rest, and another model or text may rank methods otherwise.</p>",
        *_figure(
            "Error per layer",
            "Relative error of the attention output of each layer in single steps, with all that earlier layers lost "
            "in it. Rows as in the table. Blank: not measured.",
            plots.layer_plot(ordered),
        ),
        *_figure(
            "Needles",
            "Facts stand at several depths of texts of several lengths and are asked for at the end. Dark: found, "
            "pale: lost. A cell is the mean over the kinds of fact.",
            plots.needle_plot(found, ordered),
        ),
        _notes(found.rows),
        "<footer>Made by <code>veloxquant compare</code>. The figures are in results.json and results.csv.</footer>",
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _facts(found: Comparison) -> str:
    """Where the figures come from."""
    model, text, own = found.model, found.text, found.uncompressed
    told = {
        "Model": f"{model.name}, {model.parameters / 1e6:,.0f}M parameters",
        "Compressed layers": f"{model.layers}, {model.kv_heads} heads of {model.head_dim} for keys and values",
        "Text": f"{text.name}, {text.tokens:,} tokens (sha256 {text.sha256[:12]})",
        "Read": f"{found.ctx:,} tokens as the prompt, then {found.scored:,} predictions compared",
        "Machine": found.machine,
        "Versions": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
        "Seed": str(found.seed),
    }
    if own is not None:
        needle = "" if own.needle is None else f", needles {own.needle.mean:.0%}"
        copied = "" if own.copy is None else f", copy {own.copy:.0%}"
        speed = "" if own.decode_speed is None else f", {own.decode_speed:.1f} tokens/s"
        told["Uncompressed"] = f"perplexity {own.perplexity:.2f}{needle}{copied}{speed}"
    facts = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in told.items())
    return f'<dl class="facts">{facts}</dl>'


def _figure(title: str, told: str, svg: str | None) -> list[str]:
    """A heading, a sentence and the plot, which scrolls by itself where the page is narrow; nothing without a plot."""
    if svg is None:
        return []
    return [
        f"<h2>{title}</h2><p>{told}</p>",
        f'<figure><div class="scroll" tabindex="0" role="region" aria-label="{title}">{svg}</div></figure>',
    ]


def _table(found: Comparison, ordered: Sequence[Row], failed: Sequence[Row]) -> str:
    best = {id(row) for row in front(found.rows)}
    logs = [math.log10(max(row.mean_kl, plots.LEAST_KL)) for row in ordered if row.mean_kl is not None]
    low, high = min(logs, default=0.0), max(logs, default=0.0)
    whole = next((row.bytes_16 for row in ordered if row.bytes_16), None)
    lines = [_plain(found, whole)] if found.uncompressed is not None else []
    for row in ordered:
        loss = None
        if row.mean_kl is not None and high > low:
            loss = (math.log10(max(row.mean_kl, plots.LEAST_KL)) - low) / (high - low)
        needle = row.needle and row.needle.mean
        held = "" if row.bytes is None else ", ".join(f"{kind} {size(row.bytes[kind])}" for kind in KINDS)
        cells = [
            _cell(_number(row.bits, ".2f"), None if row.bits is None else row.bits / 16),
            _cell(_number(row.ratio, ".2f", "x")),
            _cell("-" if row.nbytes is None else size(row.nbytes), tip=held),
            _cell(kl(row.mean_kl), loss),
            _cell(kl(row.p99_kl)),
            _cell(_number(row.top1_flips, ".0%"), row.top1_flips),
            _cell(_number(row.perplexity_ratio, ".3g" if (row.perplexity_ratio or 0) >= 10 else ".2f")),
            _cell(_number(needle, ".0%"), needle),
            _cell(_number(row.copy, ".0%"), row.copy),
            _cell(_number(row.decode_speed, ".2f", "x")),
            _cell(_number(row.prefill_peak, ".2f", "x")),
        ]
        kind = ' class="best"' if id(row) in best else ""
        lines.append(f"<tr{kind}>{_name(row)}{''.join(cells)}</tr>")
    span = len(HEADS) - 2
    lines += [
        f'<tr>{_name(row)}<td class="error" colspan="{span}">failed: {escape(row.error or "")}</td></tr>'
        for row in failed
    ]
    heads = "".join(f'<th scope="col"{_FAMILY if name == "family" else ""}>{name}</th>' for name in HEADS)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="All rows"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _plain(found: Comparison, whole: int | None) -> str:
    """The row of the uncompressed cache."""
    own = found.uncompressed
    assert own is not None
    needle, copied = own.needle and own.needle.mean, 1.0 if own.copy else None
    held = "-" if whole is None else size(whole)
    told = ["16.00", "1.00x", held, "0", "0", "0%", "1.00", _number(needle, ".0%"), _number(copied, ".0%"), "1.00x"]
    told.append("1.00x" if own.prefill_peak else "-")
    return f'<tr><th scope="row">uncompressed</th><td{_FAMILY}></td>{"".join(map(_cell, told))}</tr>'


def _name(row: Row) -> str:
    """The first two cells of a row: its fields as a tooltip, its family with the colour of the plot."""
    tip = escape(", ".join([row.method, *(f"{key}={value}" for key, value in row.fields.items())]))
    colour, _ = plots.look(plots.kind(row))
    dot = f'<svg viewBox="0 0 8 8" aria-hidden="true"><circle cx="4" cy="4" r="4" fill="{colour}"/></svg>'
    return f'<th scope="row" title="{tip}">{escape(row.label)}</th><td{_FAMILY}>{dot}{escape(plots.kind(row))}</td>'


def _cell(text: str, share: float | None = None, tip: str = "") -> str:
    bar = "" if share is None else f' style="--share: {min(max(share, 0), 1):.1%}"'
    return f"<td{bar}{f' title={chr(34)}{escape(tip)}{chr(34)}' if tip else ''}>{text}</td>"


def _number(value: float | None, form: str, end: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{end}"


def _notes(rows: Sequence[Row]) -> str:
    """What rows have to say, folded."""
    told = "".join(f"<li><b>{escape(row.label)}</b>: {escape(note)}</li>" for row in rows for note in row.notes)
    return f'<details><summary>Notes of rows</summary><ul class="notes">{told}</ul></details>' if told else ""
