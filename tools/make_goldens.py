"""Makes tests/golden/targets: tiny models of every target family with what Hugging Face transformers computes for them.

    python tools/make_goldens.py [CASE ...]        # in an environment with torch and transformers >= 5.19, not in .venv

Each case becomes a folder: config.json, model.safetensors (random weights, norms far from one) and expected.safetensors
with `input_ids` [2, 14], `logits`, `hidden.k` (the input of block k), `pre_norm_last` (the last block's output) and
`greedy_ids` [2, 8]. float32, attention in its plain form. Windows are shorter than the prompt.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "targets"
PROMPT, ANSWER = 14, 8
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 12}
LONG |= {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 5.0], "partial_rotary_factor": 0.75}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4}
SPARSE = {"n_routed_experts": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
SPARSE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 6}
TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

# model_type, and what differs from COMMON
CASES = {
    "llama_tiny": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "head_dim": 12}),
    "mistral_tiny": (
        "mistral",
        {"sliding_window": 5, "head_dim": 12, "hidden_act": "relu2", "tie_word_embeddings": True},
    ),
    "qwen2_tiny": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3_tiny": (
        "qwen3",
        {"head_dim": 12, "attention_bias": True, "rope_parameters": YARN, "num_key_value_heads": 1},
    ),
    "phi3_tiny": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 12, "sliding_window": 9}),
    "qwen3_moe_tiny": (
        "qwen3_moe",
        {"num_experts": 4, "norm_topk_prob": False, "decoder_sparse_step": 2, "head_dim": 8, **ROUTED},
    ),
    "mixtral_tiny": ("mixtral", {"num_local_experts": 4, "sliding_window": 6, "intermediate_size": 12}),
    "gemma2_tiny": (
        "gemma2",
        {"head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 5, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0, "layer_types": TWO_KINDS},
    ),
    "gemma3_tiny": (
        "gemma3_text",
        {"head_dim": 12, "query_pre_attn_scalar": 16, "sliding_window": 5, "layer_types": TWO_KINDS}
        | {"final_logit_softcapping": 4.0},
    ),
    "smollm3_tiny": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6, "attention_bias": True},
    ),
    "olmo2_tiny": (
        "olmo2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0}, "hidden_act": "quick_gelu"},
    ),
    "olmo3_tiny": (
        "olmo3",
        {"sliding_window": 5, "layer_types": TWO_KINDS, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 10000.0}}},
    ),
    "gpt_oss_tiny": (
        "gpt_oss",
        {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12}
        | {"sliding_window": 6, "swiglu_limit": 0.5, "rope_parameters": YARN | {"truncate": False}},
    ),
    "deepseek_tiny": (
        "deepseek_v3",
        {"q_lora_rank": 10, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "attention_bias": True}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, **LATENT, **SPARSE},
    ),
    "deepseek_plain_tiny": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 0, "norm_topk_prob": False}
        | {"rope_interleave": False, **LATENT, **SPARSE, "first_k_dense_replace": 0},
    ),
}


def random_model(kind: str, changes: dict) -> torch.nn.Module:
    config = AutoConfig.for_model(kind, **COMMON | changes)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **plain).float().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn_like(tensor)
            if "norm" in name:
                tensor.copy_(0.3 * noise + (0 if "gemma" in kind else 1))
            elif tensor.is_floating_point() and "inv_freq" not in name and "embed_scale" not in name:
                size = 1.0 if "sinks" in name or "correction" in name else 0.2
                # Gemma multiplies embeddings by sqrt(hidden); left as large, they would say each token once more.
                tensor.copy_(noise * (0.04 if "embed" in name and "gemma" in kind else size))
    return model


@torch.no_grad()
def expected(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (2, PROMPT))
    tensors, last = {"input_ids": ids}, {}
    blocks = model.model.layers
    hook = blocks[-1].register_forward_hook(
        lambda module, inputs, output: last.update(x=output[0] if isinstance(output, tuple) else output)
    )
    out = model(ids, output_hidden_states=True, use_cache=False)
    hook.remove()
    # Block inputs only: Hugging Face's state after the last block has been through the final norm.
    tensors |= {f"hidden.{k}": out.hidden_states[k] for k in range(len(blocks))}
    tensors |= {"logits": out.logits, "pre_norm_last": last["x"]}
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False
    )
    tensors["greedy_ids"] = answer[:, PROMPT:]
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def make(case: str) -> None:
    kind, changes = CASES[case]
    model = random_model(kind, changes)
    model.generation_config.eos_token_id = None
    folder = OUT / case
    tensors = expected(model)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(tensors, folder / "expected.safetensors")
    sizes = {file.name: file.stat().st_size // 1000 for file in sorted(folder.iterdir())}
    print(case, "kB:", sizes, "different greedy tokens:", len(tensors["greedy_ids"].unique()))


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        make(name)
