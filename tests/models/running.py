"""How the model tests run a model: caches of a matrix row, prompts in chunks, greedy steps."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.matrix import ROWS, Row
from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig

# One setting per method that is quick to compress, whatever methods the matrix holds.
FIRST: dict[str, Row] = {row.method: row for row in reversed(ROWS)}
QUANTISED = [row for row in ROWS if not row.drops]
DROPPING = [row for row in FIRST.values() if row.drops]

# One method for each way in which the parts work together; what depends on these alone is not run for all.
MECHANISMS: dict[str, Row] = {
    name: FIRST[name]
    for name in (
        "kivi", "kivi_sink", "turboquant_rvq", "skvq", "zipcache", "qjl", "age_tiered",
        "snapkv", "streaming_llm", "h2o", "squeeze", "nestedkv", "rocketkv",
    )
}  # fmt: skip

# Settings of so many bits that rows which are encoded later, or once more, shift no token.
FINE: dict[str, dict[str, Any]] = {
    "cachegen": {"cachegen_resolved_bits": 8},
    "a2ats": {"a2ats_retrieval_fraction": 1.0},
    "age_tiered": {"age_bits_mid": 8, "age_bits_old": 8},
    "amc": {"amc_k_high": 1.0, "amc_k_mid": 0.0},
    "vecinfer": {"key_codebook_bits": 8, "key_sub_dim": 1, "value_codebook_bits": 8, "value_sub_dim": 1},
    "anchorkv": {"anchorkv_theta": 1.0, "anchorkv_residual_bits": 4, "anchorkv_window": 128},
    "kivi": {"bit_width_inlier": 8},
    "kivi_sink": {"bit_width_inlier": 8},
    "adakv": {"adakv_lo_bit": 8, "adakv_mid_bit": 8, "adakv_hi_bit": 8, "adakv_target_avg_bits": 8.0},
    "zipcache": {"zipcache_hi_bits": 8, "zipcache_lo_bits": 8},
    "kitty": {"kitty_lo_bit": 8, "kitty_hi_bit": 8},
    "gear": {"gear_bits": 8},
    "xquant": {"xquant_base_bits": 8, "xquant_residual_bits": 8},
    "xkv": {"xkv_rank": 64, "xkv_max_ctx": 32},  # latents are half a row at most: so many that rows stay as they are
    "minicache": {"minicache_retention_threshold": 1.0},
    "kvquant": {"kvquant_bits": 5, "kvquant_outlier_fraction": 0.4},
    "skvq": {"skvq_bits_key": 8, "skvq_bits_value": 8},
    "spectral": {"bit_width_inlier": 8},
    "svdq": {"svdq_bit_schedule": (8,)},
    "kvtc": {"kvtc_bit_choices": (8,), "kvtc_bit_budget": 2064},
    "palu": {"palu_rank": None, "palu_energy_threshold": 1.0, "palu_hi_bit": 16, "palu_lo_bit": 16},
    "polar": {"bit_width_inlier": 6},
    "nsnquant": {"nsn_codebook_size": 64, "nsn_subvector_dim": 1},
    "qjl": {"bit_width_inlier": 8, "jl_dim": 1 << 13, "n_outlier_channels": 0},  # noise falls with the root only
    "turboquant_mse": {"bit_width_inlier": 8},
    "turboquant_prod": {"bit_width_inlier": 8, "bit_width_outlier": 8},
    "turboquant_rvq": {"bit_width_inlier": 4},
}


def fine(row: Row) -> dict[str, Any]:
    """Settings of many bits for the method of ``row``, where it has any."""
    return FINE.get(row.method, {})


def tolerance(row: Row) -> float:
    """How far logits may be off once tokens were taken back and others came, with ``fine`` settings.

    Where tokens wait in a window or a block, some that would wait again stay encoded: half a step of many bits, 0.2 %
    of a range, in logits of order one. Where every token is encoded at once: float32 sums.
    """
    recipe = row.cache()._recipe
    return 0.02 if any(s.window or s.chunk > 1 for s in (recipe.keys, recipe.values)) else 1e-5


def config(row: Row, **fields: Any) -> KVCacheConfig:
    return KVCacheConfig(**{"method": row.method, **row.fields, **fields})


def caches_of(model: Any, row: Row, **fields: Any) -> list[Any]:
    return KVCacheBuilder.for_model(model, config(row, **fields), serve_standalone=True)


def prefill(model: Any, caches: list[Any], ids: mx.array, step: int) -> np.ndarray:
    """Logits ``(S, vocabulary)`` of ``ids`` ``(1, S)``, fed as mlx_lm feeds a prompt: its last token alone."""
    out, last = [], ids.shape[1] - 1
    for start in [*range(0, last, step), last]:
        stop = min(start + step, last) if start < last else last + 1
        out.append(model(ids[:, start:stop], cache=caches))
        mx.eval(out[-1], [c.state for c in caches])
    return np.array(mx.concatenate(out, axis=1)[0])


def decode(model: Any, caches: list[Any], ids: mx.array) -> np.ndarray:
    """Logits ``(S, vocabulary)`` of ``ids`` ``(1, S)``, one token at a time and evaluated as mlx_lm does."""
    out = []
    for i in range(ids.shape[1]):
        out.append(model(ids[:, i : i + 1], cache=caches))
        mx.eval(out[-1])
    return np.array(mx.concatenate(out, axis=1)[0])


def greedy(model: Any, prompt: mx.array, n: int, **kwargs: Any) -> tuple[list[int], np.ndarray]:
    """Tokens and log probabilities ``(n, vocabulary)`` from mlx_lm's ``generate_step``; ``prompt`` is ``(S,)``."""
    steps = [(int(token), np.array(row)) for token, row in generate_step(prompt, model, max_tokens=n, **kwargs)]
    return [token for token, _ in steps], np.stack([row for _, row in steps])


def token_list(count: int, seed: int = 0) -> list[int]:
    """``tiny.tokens`` as a list."""
    return np.array(tiny.tokens(count, seed))[0].tolist()


def word_tokenizer() -> TokenizerWrapper:
    """A tokenizer for the vocabulary of the tiny models: token 7 is "w7"; no token ends a text."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[reportAttributeAccessIssue]
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=words))


_MIX = mx.random.normal((tiny.VOCAB, tiny.VOCAB), key=mx.random.key(5))


def lively(logprobs: mx.array) -> mx.array:
    """A sampler without chance whose tokens follow every number of ``logprobs`` ``(..., vocabulary)``.

    Greedy decoding of a random model tends to repeat one token, which hides what its caches hold.
    """
    spread = (logprobs - logprobs.mean(-1, keepdims=True)) / mx.std(logprobs, -1, keepdims=True)
    return (mx.cos(3 * spread) @ _MIX).argmax(-1)
