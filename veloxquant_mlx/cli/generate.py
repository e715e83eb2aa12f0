"""``veloxquant generate``: mlx_lm's own generation with a compressed cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from ..cache.base import KVCacheBuilder, ModelConfig
from ..core.exceptions import ArtifactNotFoundError, CacheInputError
from ..core.text import size


def location(name: str) -> str:
    """The folder or the repository's name that mlx_lm takes; an error for what can only be a folder and is none."""
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not path.is_dir():
        raise ArtifactNotFoundError(f"model {name!r} is not a folder. Give the folder of an mlx_lm model.")
    return str(path) if path.is_dir() else name


def unloadable(name: str, error: Exception) -> ArtifactNotFoundError:
    """One readable error for whatever went wrong in loading."""
    return ArtifactNotFoundError(
        f"model {name!r} cannot be loaded ({type(error).__name__}: {[*str(error).splitlines(), ''][0]}). "
        "Give a folder with config.json, safetensors and a tokenizer, or a repository that can be reached."
    )


def load(name: str) -> tuple[Any, Any]:
    """Model and tokenizer from a folder or a repository."""
    from mlx_lm import load as mlx_lm_load

    where = location(name)
    try:
        model, tokenizer, *_ = mlx_lm_load(where)
    except Exception as error:
        raise unloadable(name, error) from error
    return model, tokenizer


def prompt_ids(tokenizer: Any, prompt: str, raw: bool = False) -> list[int]:
    """Tokens of ``prompt``, as one user message where the tokenizer has a chat template."""
    if raw or tokenizer.chat_template is None:
        return list(tokenizer.encode(prompt))
    return list(tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True))


def generate_text(
    name: str,
    prompt: str,
    config: ModelConfig | None,
    max_tokens: int,
    raw: bool,
    report: bool,
    out: Console,
    err: Console,
) -> None:
    """Stream the model's text to ``out`` and the figures to ``err``; ``config`` None is the model's own cache."""
    from mlx_lm import stream_generate
    from mlx_lm.models.cache import make_prompt_cache

    from ..cache.report import cache_report
    from ..coordinators.reconstruction import remember_tokenizer

    model, tokenizer = load(name)
    ids = prompt_ids(tokenizer, prompt, raw)
    if not ids:
        raise CacheInputError("--prompt cannot be used: it has no tokens. Give some text.")
    remember_tokenizer(model, tokenizer)
    if config is None:
        caches = make_prompt_cache(model)
    else:
        caches = KVCacheBuilder.for_model(model, config, serve_standalone=True)
    last = None
    for last in stream_generate(model, tokenizer, ids, max_tokens=max_tokens, prompt_cache=caches):
        out.print(last.text, end="", markup=False, soft_wrap=True)
    out.print()
    if last is not None:
        held = size(cache_report(caches).nbytes)
        err.print(
            f"[dim]{last.prompt_tokens} prompt tokens at {last.prompt_tps:.0f}/s, {last.generation_tokens} generated "
            f"at {last.generation_tps:.1f}/s, keys and values held: {held}[/]",
            soft_wrap=True,
        )
    if report:
        out.print(str(cache_report(caches)), markup=False, soft_wrap=True)
