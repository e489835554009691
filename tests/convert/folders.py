"""Draft folders as other systems write them, made by hand: their names and keys, not our writers'."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import eagle3_jax as e3
from eagle3_jax.draft.draft import stored_tensors

TAPS = [2, 4, 6]
LAYOUTS = ["speculators", "sglang", "modelopt", "safeailab"]

FLAT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "draft_vocab_size": 128,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "safeailab": {**FLAT, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"},
    "sglang": {
        **FLAT,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 36,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True},
    },
    "modelopt": {
        **FLAT,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "rope_scaling": {"rope_type": "default", "rope_theta": 500000.0},
        "pretraining_tp": 1,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
        },
    },
    "speculators": {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "draft_vocab_size": 128,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
        "norm_before_residual": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformer_layer_config": {
            **{key: value for key, value in FLAT.items() if key != "draft_vocab_size"},
            "model_type": "llama",
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    },
}
PREFIX = {"safeailab": "midlayer.", "sglang": "midlayer.", "modelopt": "layers.0.", "speculators": "layers.0."}


def tensors_of(draft: e3.Draft, layout: str) -> dict[str, np.ndarray]:
    """The draft's tensors under a format's names; only speculators stores the embedding, ModelOpt has no t2d."""
    left_out = {"speculators": (), "modelopt": ("embed_tokens.weight", "t2d")}.get(layout, ("embed_tokens.weight",))
    kept = {name: array for name, array in stored_tensors(draft).items() if name not in left_out}
    return {name.replace("layers.0.", PREFIX[layout], 1): array for name, array in kept.items()}


def write(
    folder: Path,
    draft: e3.Draft,
    layout: str,
    rename: Callable[[str], str] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    **changes: Any,
) -> Path:
    """A folder in `layout`. rename: of tensor names; tensors, changes: replaced, added, or with None left out."""
    folder.mkdir(parents=True)
    stored = {**tensors_of(draft, layout), **(tensors or {})}
    stored = {(rename or str)(name): array for name, array in stored.items() if array is not None}
    raw = {key: value for key, value in {**CONFIGS[layout], **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, folder / "model.safetensors")
    return folder


def same_tensors(draft: e3.Draft, expected: dict[str, np.ndarray]) -> None:
    got = stored_tensors(draft)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array, err_msg=name)
