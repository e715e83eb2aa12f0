"""Writes docs/methods/: a page per method, from its options, its docstring, its recipe and the measured rows.

python tools/method_pages.py           writes the pages
python tools/method_pages.py --check   fails where the pages in docs/ say something else
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlx.core as mx  # noqa: E402

from tests.matrix import ROWS  # noqa: E402
from tools.method_notes import NOTES  # noqa: E402
from tools.method_numbers import MODELS, NOT_MEASURED, best, compared, dropped, quality, settings  # noqa: E402
from veloxquant_mlx import KVCacheConfig, QuantizerConfigError  # noqa: E402
from veloxquant_mlx.cache.base import STANDALONE_METHODS  # noqa: E402
from veloxquant_mlx.cache.registry import COMMON, METHODS, Method, method  # noqa: E402
from veloxquant_mlx.cli.methods import source  # noqa: E402
from veloxquant_mlx.codecs.base import GuidedCodec  # noqa: E402
from veloxquant_mlx.core.types import NEVER, LayerInfo, Recipe, Stream  # noqa: E402
from veloxquant_mlx.methods import _general, vecinfer  # noqa: E402

PAGES = ROOT / "docs" / "methods"
MARK = "<!-- Written by tools/method_pages.py: do not edit. -->\n"
TOGETHER = ("xquant", "minicache", "xkv")  # layers that are packed together, as many as their group_size says
# A layer as many models have it; nothing in a page depends on more than it says.
LAYER = LayerInfo(head_dim=128, value_dim=128, kv_heads=8, query_heads=32, index=20, rank=20, n_layers=32)


def code(value: Any) -> str:
    """A value in a table cell."""
    return "`" + repr(value).replace("|", r"\|") + "`"


def cell(text: str) -> str:
    return text.replace("|", r"\|")


def link(entry: Method) -> str:
    """Where the method comes from, with a link where there is one."""
    info = entry.info
    if info.arxiv:
        venue = f", {info.venue}" if info.venue else ""
        return f"[arXiv:{info.arxiv}](https://arxiv.org/abs/{info.arxiv}){venue}"
    return source(entry)


def prose(text: str) -> str:
    """A docstring as Markdown."""
    return text.replace("``", "`").replace("[design]", "**[design]**")


def docstring(entry: Method) -> tuple[str, str]:
    """The first sentence of the module's docstring, and the rest."""
    first, _, rest = (inspect.getdoc(entry.module) or "").partition("\n\n")
    return " ".join(first.split()), rest


@cache
def recipe(name: str) -> Recipe:
    """How the method stores a layer, all fields at their defaults."""
    config = KVCacheConfig(method=name)  # type: ignore[arg-type]
    members = getattr(config, f"{name}_group_size") if name in TOGETHER else 1
    return method(name).recipe(config, dataclasses.replace(LAYER, members=members))


def drops(r: Recipe) -> bool:
    """Whether tokens are forgotten."""
    return r.eviction is not None and r.eviction.drops


def packed_bits(stream: Stream) -> float | None:
    """Bits per packed number, parameters included; None where they depend on the data or on other layers."""
    codec = stream.codec
    if codec is None or codec.fit_rows or isinstance(codec, GuidedCodec) or stream.older or stream.chunk >= NEVER:
        return None
    rows, dim = codec.block * 8, LAYER.head_dim
    x = mx.random.normal((1, LAYER.kv_heads or 1, rows, dim), key=mx.random.key(0))
    try:
        codes = codec.encode(x)
    except TypeError:  # a joint codec takes the rows of several layers
        return None
    return 8 * sum(a.nbytes for a in codes.values()) / x.size


def storage(stream: Stream, drops: bool) -> list[str]:
    """Cells about one tensor: packing, exact tokens."""
    if stream.codec is None:
        return ["not packed", "all that stay" if drops else "all"]
    bits = packed_bits(stream)
    said = ["see below" if bits is None else f"{bits:.2f}"]
    said += ["the first prompt in one block"] * (stream.prompt is not None)
    later = "later ones " if stream.prompt is not None else ""
    said += [f"{later}in blocks of {stream.chunk} tokens"] * (1 < stream.chunk < NEVER)
    said += ["fewer bits with age"] * bool(stream.older)
    exact = [f"first {stream.sinks}"] * (stream.sinks > 0) + [f"newest {stream.window}"] * (stream.window > 0)
    exact += [f"fewer than {stream.chunk} that wait"] * (1 < stream.chunk < NEVER)
    exact += ["all after the first prompt"] * (stream.chunk >= NEVER)
    return [", ".join(said), ", ".join(exact) or "none"]


def identity(entry: Method) -> Iterator[str]:
    info, r = entry.info, recipe(entry.info.name)
    yield f"| Name | `{info.name}` |"
    yield "|---|---|"
    if info.paper:
        yield f"| Paper | {cell(info.paper)} |"
    yield f"| Source | {link(entry)} |"
    yield f"| Family | {info.family} |"
    yield f"| Needs | {info.needs} |"
    yield f"| Options class | {f'`{info.options.__name__}`' if info.options else 'none'} |"
    if drops(r):
        yield "| Keeps | some of the tokens |"
    elif r.eviction is not None:
        yield "| Keeps | all tokens, reads some |"
    else:
        yield "| Keeps | all tokens |"


def usage(entry: Method) -> Iterator[str]:
    name = entry.info.name
    extra = ", serve_standalone=True" if name in STANDALONE_METHODS else ""
    fields = {"qfilters_on_low_retention": "ignore"} if name == "qfilters" else {}
    more = "".join(f", {key}={value!r}" for key, value in fields.items())
    yield "```python"
    yield "from mlx_lm import generate, load"
    yield "from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, cache_report"
    yield ""
    yield 'model, tokenizer = load("./my-model")'
    yield f'caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="{name}"{more}){extra})'
    yield 'print(generate(model, tokenizer, "Once upon a time", max_tokens=8, prompt_cache=caches))'
    yield "print(cache_report(caches))"
    yield "```"


def own_fields(entry: Method) -> Iterator[tuple[str, Any, str, str]]:
    """Name, default, valid range and help of every field that the method reads beyond the common ones."""
    shared = {
        f.name: f
        for group in (_general.CoreFields, vecinfer.VecInferOptions, _general.SharedFields, _general.KernelFields)
        for f in dataclasses.fields(group)
    }
    options = dataclasses.fields(entry.info.options) if entry.info.options else ()
    for f in options:
        yield f.name, f.default, f.metadata["valid"].text, f.metadata["help"]
    for name, valid in entry.info.reads.items():
        f = shared[name]
        yield name, f.default, valid.text, f.metadata["help"]


def fields_table(entry: Method) -> Iterator[str]:
    yield "| Field | Default | Must be | Meaning |"
    yield "|---|---|---|---|"
    for name, default, valid, help in own_fields(entry):
        yield f"| `{name}` | {code(default)} | {cell(valid)} | {cell(help)} |"
    yield ""
    yield "A value outside is refused when the cache is made, with the field, the valid range and a remedy. Beside"
    yield "these there are the [fields of every method](index.md#fields-of-every-method)."


def formula(name: str) -> tuple[str, str]:
    """What the tests say a cache holds: in words, and as code."""
    held = next(row.held for row in ROWS if row.method == name)
    module = inspect.getmodule(held)
    maker = getattr(module, held.__qualname__.partition(".")[0], None)
    words = inspect.getdoc(maker) or ""
    return words.replace("``", "`"), textwrap.dedent(inspect.getsource(held)).rstrip()


def bytes_held(name: str) -> Iterator[str]:
    r = recipe(name)
    yield f"With the defaults, in layer {LAYER.index + 1} of {LAYER.n_layers}, heads of {LAYER.head_dim} numbers:"
    yield ""
    yield "| | Bits per packed number | Exact tokens |"
    yield "|---|---|---|"
    for title, stream in (("Keys", r.keys), ("Values", r.values)):
        yield f"| {title} | {' | '.join(storage(stream, drops(r)))} |"
    yield ""
    if r.together > 1:
        yield f"{r.together} layers are packed together, and what they share is counted once. What a layer alone holds:"
        yield ""
    words, text = formula(name)
    yield from (words, "") if words else ()
    yield '<details markdown="1">'
    yield "<summary>The formula that the tests check, byte for byte</summary>"
    yield ""
    yield "`shape` is `(sequences, key/value heads, key size, value size)`, `itemsize` 2 for 16-bit models; other"
    yield "names are settings of the test in `tests/matrix.py`. Rows that only become more take room for `GROW` = 256"
    yield "at a time."
    yield ""
    yield "```python"
    yield text
    yield "```"
    yield ""
    yield "</details>"


def measured(name: str) -> Iterator[str]:
    for model, title in MODELS.items():
        rows = quality(name, model)
        yield f"### {title}"
        yield ""
        if not rows:
            yield f"Quality per bit: {NOT_MEASURED}."
            yield ""
            continue
        about = settings("quality", model)
        length = f"{about['scored']} predictions after {about['prompt']:,} tokens"
        yield f"{length}, keys and values in 16 bits (`benchmarks/quality.py`):"
        yield ""
        yield "| Setting | Bits held per number | Mean KL, nats | Same first choice | On |"
        yield "|---|---|---|---|---|"
        for row in rows:
            kl = f"{row['mean KL']:.4f}"
            yield f"| {cell(row['cache'])} | {row['bits held']:.2f} | {kl} | {row['top-1']:.0%} | {row['device']} |"
        yield ""
    if drops(recipe(name)):
        yield from dropping(name)
    yield from compared(name)


def dropping(name: str) -> Iterator[str]:
    yield "### Tokens dropped"
    yield ""
    found = {model: dropped(name, model) for model in MODELS}
    if not any(found.values()):
        yield f"{NOT_MEASURED.capitalize()}."
        yield ""
        return
    about = settings("eviction", "smollm2")
    yield f"A prompt of {about['prompt']:,} tokens in float32, then {about['scored'] - 1} predictions. A number hidden"
    yield "at three depths is asked for at the end (`benchmarks/eviction.py`, [more](../dropping.md#measured)):"
    yield ""
    yield "| Model | Tokens kept | Bytes, of uncompressed | Mean KL, nats | Log-probability of the number | Found |"
    yield "|---|---|---|---|---|---|"
    for model, rows in found.items():
        for row in rows:
            found_of = f"{round(3 * row['needle exact'])} of 3"
            yield (
                f"| {MODELS[model]} | {row['budget']} | {row['bytes held / float32']:.0%} | {row['mean KL']:.3f} "
                f"| {row['needle log-probability']:.2f} | {found_of} |"
            )
    yield ""


def takes_capacity(name: str) -> bool:
    """Whether a hard cap can be put on the method's default settings."""
    try:
        method(name).check(KVCacheConfig(method=name, capacity=1 << 20))  # type: ignore[arg-type]
    except QuantizerConfigError:
        return False
    return True


def limits(entry: Method) -> Iterator[str]:
    info, r = entry.info, recipe(entry.info.name)
    yield from (f"- {text}" for text in NOTES[info.name].limits)
    if drops(r):
        yield "- Drops tokens: it cannot be trimmed, so speculative decoding is refused."
        if info.name != "streaming_llm":
            unless = (
                "unless `capacity` caps it"
                if takes_capacity(info.name)
                else "and `capacity` is refused at the defaults"
            )
            yield f"- The prompt is held in full until it ends, {unless}."
    if r.deferred:
        yield "- Nothing is packed before the prompt ends (the first step of a single token); the prompt's peak stays."
    if r.together > 1:
        yield f"- {r.together} layers are packed together, so rows wait as floats until the last of them has run."
    if r.most_raw:
        yield f"- At most `{r.most_raw[0]}` tokens wait; then packing does not wait for the end of the prompt."
    if info.needs.startswith("real queries") and "only" not in info.needs:
        yield "- Models whose attention does not come back to the cache are refused (see [coverage](../coverage.md))."
    if "rope" in info.needs:
        yield "- Where a layer's rotary positions are not known the receipt says what is done instead."
    if info.name in STANDALONE_METHODS:
        yield "- `KVCacheFactory.create` gives the standalone `KVCache`; models need `serve_standalone=True`."
    yield "- No Metal device has run it ([honest limits](../limits.md))."


def page(name: str) -> str:
    """The page of one method."""
    entry = method(name)
    first, rest = docstring(entry)
    lines = [
        MARK,
        f"# {entry.info.title}",
        "",
        prose(first),
        "",
        *identity(entry),
        "",
        f"**When to use it.** {NOTES[name].use}",
        "",
        *usage(entry),
        "",
        "## Idea and design",
        "",
        "What the paper leaves open and we decided is marked **[design]** or *ours*, what could not be confirmed",
        "*uncertain*.",
        "",
        prose(rest),
        "",
        "## Fields",
        "",
        *fields_table(entry),
        "",
        "## Bytes held",
        "",
        *bytes_held(name),
        "",
        "## Measured",
        "",
        *measured(name),
        "## Limits",
        "",
        *limits(entry),
        "",
    ]
    return "\n".join(lines)


def index() -> str:
    """The page of all methods."""
    lines = [
        MARK,
        "# Methods",
        "",
        f"All {len(METHODS)}. For two models: bits held per number of a compressed layer, everything counted, and the",
        "mean KL from the uncompressed cache in nats, of the setting with the fewest bits and of the closest one.",
        "A star: a quarter of 1,500 tokens kept, another measurement than the others (float32, as if it were 16 bits).",
        "A small model ranks methods roughly: measure your own.",
        "",
        "| Method | Family | Source | " + " | ".join(MODELS.values()) + " |",
        "|---|---|---|" + "---|" * len(MODELS),
    ]
    for name in METHODS:
        entry = method(name)
        row = [f"[`{name}`]({name}.md)", entry.info.family, link(entry), *(best(name, model) for model in MODELS)]
        lines.append(f"| {' | '.join(row)} |")
    lines += [
        "",
        "## Two methods at once",
        "",
        "One that drops tokens and one that packs those that stay:",
        '`[KVCacheConfig(method="snapkv"), KVCacheConfig(method="kivi")]`.',
        "See [Methods that drop tokens](../dropping.md).",
        "",
        "## Fields of every method",
        "",
        "| Field | Default | Must be | Meaning |",
        "|---|---|---|---|",
    ]
    for f in dataclasses.fields(_general.CoreFields):
        if f.name in COMMON:
            default = [] if f.default is dataclasses.MISSING else f.default
            valid, help = f.metadata["valid"].text, f.metadata["help"]
            lines.append(f"| `{f.name}` | {code(default)} | {cell(valid)} | {cell(help)} |")
    lines += [
        "",
        "A field that a method does not read must stay at its default: it is refused rather than ignored.",
        "",
    ]
    return "\n".join(lines)


def render() -> dict[Path, str]:
    """Every file under docs/methods/ and its text."""
    return {PAGES / "index.md": index(), **{PAGES / f"{name}.md": page(name) for name in METHODS}}


def main(arguments: list[str]) -> int:
    pages = render()
    strays = [path for path in PAGES.glob("*.md") if path not in pages]
    if "--check" in arguments:
        stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
        for path in [*stale, *strays]:
            print(f"{path.relative_to(ROOT)} is stale: run python tools/method_pages.py", file=sys.stderr)
        return 1 if stale or strays else 0
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in strays:
        path.unlink()
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
