"""Shapes of known models by name, as their config.json: for plans and benchmarks without a checkpoint."""

import re
from collections.abc import Collection
from typing import Any

from rlsys.utils.errors import ConfigError


def sizes_of(text: str, allowed: Collection[str]) -> dict[str, int]:
    """Parallel sizes out of "TP2xPP2": {"tp": 2, "pp": 2}; ConfigError for anything else."""
    sizes: dict[str, int] = {}
    for part in text.lower().split("x"):
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        if match is None or match[1] not in allowed or match[1] in sizes or not int(match[2]):
            raise ConfigError(f"'{part}' in '{text}' is not a size; use {'x'.join(f'{n.upper()}n' for n in allowed)}")
        sizes[match[1]] = int(match[2])
    return sizes


def _qwen2(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
    }


def _qwen3_moe(layers: int, hidden: int, expert_ffn: int, experts: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        **_qwen2(layers, hidden, 3 * hidden, heads, 4, vocab, tied=False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128 if hidden > 256 else 16,
        "moe_intermediate_size": expert_ffn,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "router_aux_loss_coef": 0.001,
    }


DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "num_nextn_predict_layers": 0,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen2(4, 64, 96, 4, 2, 250, tied=True),
    "tiny-moe": _qwen3_moe(4, 64, 48, 8, 8, 250),
    "135M": {
        **_qwen2(30, 576, 1536, 9, 3, 49152, tied=True),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    },
    "8B": {
        **_qwen2(32, 4096, 14336, 32, 8, 128256, tied=False),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    },
    "0.5B": _qwen2(24, 896, 4864, 14, 2, 151936, tied=True),
    "1.5B": _qwen2(28, 1536, 8960, 12, 2, 151936, tied=True),
    "7B": _qwen2(28, 3584, 18944, 28, 4, 152064, tied=False),
    "32B": _qwen2(64, 5120, 27648, 40, 8, 152064, tied=False),
    "30B-A3B": _qwen3_moe(48, 2048, 768, 128, 32, 151936),
    "235B-A22B": _qwen3_moe(94, 4096, 1536, 128, 64, 151936),
    "671B": DEEPSEEK_V3,
}
