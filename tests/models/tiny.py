"""Tiny random float32 models of many mlx_lm architectures, for tests: vocabulary 128, a few layers, seeded."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

VOCAB = 128

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
_LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": 32,
}
_NO_TIE = {"tie_word_embeddings": False}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_GEMMA3N = {
    **_BASE,
    "model_type": "gemma3n",
    "num_hidden_layers": 6,
    "head_dim": 16,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "activation_sparsity_pattern": [0.0] * 6,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "intermediate_size": [96] * 6,
}
_LLAMA4 = {
    **_BASE,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "attention_bias": False,
    "attention_chunk_size": 16,
    "head_dim": 16,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_qk_norm": True,
}

# name -> (module of mlx_lm.models, arguments)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_BASE, **_NO_TIE}),  # tied, a random model repeats one token, whatever its caches hold
    "llama_llama3": ("llama", {**_BASE, "rope_scaling": _LLAMA3}),
    "llama_yarn": ("llama", {**_BASE, "rope_scaling": _YARN}),
    "llama_dynamic": (
        "llama",
        {**_BASE, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
    ),
    "mistral": ("llama", {**_BASE, "model_type": "mistral", "head_dim": 32, "sliding_window": None}),
    "qwen2": ("qwen2", {**_BASE, **_NO_TIE}),
    "qwen3": ("qwen3", {**_BASE, **_NO_TIE, "max_position_embeddings": 256, "head_dim": 32, "rope_theta": 1e6}),
    "smollm3": ("smollm3", {**_BASE, "num_hidden_layers": 4}),
    "gemma2": ("gemma2", {**_BASE, "head_dim": 16}),
    "gemma3_text": (
        "gemma3_text",
        {**_BASE, "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2},
    ),
    "gemma3": (
        "gemma3",
        {
            "text_config": {
                **_BASE,
                "model_type": "gemma3_text",
                "num_hidden_layers": 4,
                "head_dim": 32,
                "sliding_window": 8,
                "sliding_window_pattern": 2,
            },
            "vocab_size": VOCAB,
        },
    ),
    "gemma3n": ("gemma3n", {"text_config": _GEMMA3N}),
    "gemma4_text": (
        "gemma4_text",
        {
            **_BASE,
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_BASE,
            "head_dim": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", {**_BASE, "partial_rotary_factor": 0.5}),
    "phi3_long": ("phi3", {**_BASE, "rope_scaling": _LONG, "max_position_embeddings": 256}),
    "cohere2": (
        "cohere2",
        {**_BASE, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2},
    ),
    "minicpm3": (
        "minicpm3",
        {
            **_BASE,
            "dim_model_base": 64,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 16,
            "kv_lora_rank": 32,
            "scale_depth": 1.4,
            "scale_emb": 12,
            "max_position_embeddings": 256,
            "rope_scaling": _LONG,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_BASE,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
            "first_k_dense_replace": 2,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_BASE,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_BASE,
            **_MOE,
            "num_hidden_layers": 4,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 256,
            "head_dim": 32,
            "full_attention_interval": 2,
        },
    ),
    "jamba": (
        "jamba",
        {
            **_BASE,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "max_position_embeddings": 256,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_BASE,
            "num_hidden_layers": 4,
            "max_position_embeddings": 256,
            "attention_bias": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 1,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "hybrid_override_pattern": ["M", "-", "*", "-"],
            "head_dim": 16,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_BASE,
            "head_dim": 16,
            "mamba_d_head": 16,
            "mamba_d_ssm": 64,
            "mamba_d_state": 16,
            "mamba_n_heads": 4,
            "rope_theta": 10000.0,
        },
    ),
    "llama4": ("llama4", {"text_config": _LLAMA4}),
    "afm7": (
        "afm7",
        {
            "vocab_size": VOCAB,
            "hidden_dim": 64,
            "num_layers": 4,
            "num_kv_reuse_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
    ),
    "iquestloopcoder": ("iquestloopcoder", {**_BASE, "head_dim": 16, "loop_window_size": 8}),
    "nanbeige": ("nanbeige", {**_BASE, "head_dim": 16, "num_loops": 2}),
    "gpt2": (
        "gpt2",
        {"n_ctx": 256, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "layer_norm_epsilon": 1e-5,
         "vocab_size": VOCAB},
    ),
    "gpt_neox": (
        "gpt_neox",
        {**_BASE, "max_position_embeddings": 256, "layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    ),
    "stablelm": (
        "stablelm",
        {**_BASE, "rope_theta": 10000.0, "use_qkv_bias": True, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
    ),
    "exaone": ("exaone", {**_BASE, "num_layers": 2, "rope_theta": 10000.0, "layer_norm_epsilon": 1e-5}),
    "exaone4": (
        "exaone4",
        {
            **_BASE,
            "num_hidden_layers": 4,
            "max_position_embeddings": 256,
            "rope_theta": 10000.0,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_scaling": _LLAMA3,
            "sliding_window": 8,
            "sliding_window_pattern": "LG",
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        },
    ),
    "phixtral": (
        "phixtral",
        {
            "num_vocab": VOCAB,
            "model_dim": 64,
            "num_heads": 4,
            "num_layers": 2,
            "rotary_dim": 8,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
        },
    ),
    "mistral3": ("mistral3", {"text_config": {**_BASE, "model_type": "mistral"}}),
    "ministral3": (
        "ministral3",
        {
            **_BASE,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
                "rope_type": "default",
            },
        },
    ),
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128,
         "state_size": 16, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 1,
         "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True, "time_step_limit": [0.0, 100.0],
         "time_step_rank": "auto"},
    ),
}  # fmt: skip


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """The model ``name`` of CONFIGS, some arguments changed.

    Vectors (norm weights, biases, sinks) are random too, so that nothing hides.
    """
    module, arguments = CONFIGS[name]
    arguments = arguments | changes
    library = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(seed)
    model: nn.Module = library.Model(library.ModelArgs.from_dict({"model_type": module, **copy.deepcopy(arguments)}))

    def jitter(array: mx.array) -> mx.array:
        if array.ndim != 1 or not mx.issubdtype(array.dtype, mx.floating):
            return array
        return array + 0.2 * mx.random.normal(array.shape)

    model.update(tree_map(jitter, model.parameters()))
    mx.eval(model.parameters())
    return model


def tokens(count: int, seed: int = 0) -> mx.array:
    """``(1, count)`` random token ids."""
    return mx.random.randint(0, VOCAB, (1, count), key=mx.random.key(seed))
