"""A small random model of every family, written as transformers writes it."""

import json
from pathlib import Path
from typing import Any

import torch

DENSE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LATENT = {
    **DENSE,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "routed_scaling_factor": 1.7,
    "num_nextn_predict_layers": 0,
    "num_key_value_heads": 8,
}
GLM = {
    **{name: value for name, value in LATENT.items() if "_rank" not in name and "_head_dim" not in name},
    "model_type": "glm4_moe",
    "num_key_value_heads": 4,
    "attention_bias": True,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 64,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 1.1,
    "original_max_position_embeddings": 2048,
}
PLAIN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 6}
GATED_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
TEXT_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-linear-rope": {
        **DENSE,
        "model_type": "llama",
        "head_dim": 8,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "qwen2-tied": {**DENSE, "model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {**DENSE, "model_type": "qwen3", "head_dim": 12, "rope_parameters": {**PLAIN_YARN, "truncate": True}},
    "qwen3-moe": {
        **DENSE,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [2],
    },
    "qwen3-moe-unnormalised": {**DENSE, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 8},
    "mixtral": {**DENSE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek-v3": {**LATENT, "model_type": "deepseek_v3", "rope_parameters": YARN},
    "glm4-moe": {**GLM, "head_dim": 8, "use_qk_norm": True},
    "glm4-moe-air": {**GLM, "n_group": 1, "topk_group": 1},
    "gemma3": {
        **DENSE,
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "head_dim": 6,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 9,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gpt-oss": {
        **DENSE,
        "model_type": "gpt_oss",
        "head_dim": 6,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 5,
        "swiglu_limit": 0.7,
        "rope_parameters": PLAIN_YARN,
        "experts_implementation": "eager",
    },
    "mistral": {**DENSE, "model_type": "mistral", "sliding_window": 5},
    "qwen3-next": {
        **DENSE,
        **EXPERTS,
        **GATED_DELTA,
        "model_type": "qwen3_next",
        "num_experts": 8,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [2],
    },
    "qwen3.5": {
        **DENSE,
        **GATED_DELTA,
        "model_type": "qwen3_5_text",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": TEXT_ROPE,
    },
    "qwen3.5-moe": {
        **{name: value for name, value in DENSE.items() if name != "intermediate_size"},
        **EXPERTS,
        **GATED_DELTA,
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "shared_expert_intermediate_size": 24,
        "rope_parameters": TEXT_ROPE,
    },
    "deepseek-v3-full-q": {**LATENT, "model_type": "deepseek_v3", "q_lora_rank": None, "n_group": 1, "topk_group": 1},
}


def write_model(name: str, path: Path) -> Any:
    """Write the model as a directory and return it: random weights, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = dict(CONFIGS[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor_name.endswith(("norm.weight", "bias", "sinks", "A_log")):
                tensor.copy_(torch.randn_like(tensor) * 0.3 + tensor_name.endswith("norm.weight"))
    model.save_pretrained(path, max_shard_size="100KB")
    return model


def read_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())
