"""What differs between the families of GGUF files: names, keys, and what llama.cpp's converter does to the weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

from eagle3_jax.errors import UserError
from eagle3_jax.models.config import FULL, SLIDING, kinds_by_period
from eagle3_jax.models.gguf_header import Header

_ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
_MLP = {f"ffn_{kind}.weight": f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")}
_BLOCK = _ATTENTION | {"ffn_norm.weight": "post_attention_layernorm.weight"} | _MLP
_BIASES = {f"attn_{kind}.bias": f"self_attn.{kind}_proj.bias" for kind in "qkv"}
_HEAD_NORMS = {f"attn_{kind}_norm.weight": f"self_attn.{kind}_norm.weight" for kind in "qk"}
_SANDWICH = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_GEMMA_27B_LAYERS = 62


class GGUFFamily(NamedTuple):
    """name: in general.architecture; architecture, model_type: in config.json. tensors: of a block, to their names in
    Hugging Face. keys: metadata beyond what all have. ropes: scalings beyond linear. permuted: rows of q and k are in
    llama.cpp's order. norm_offset: what the converter has added to norm weights. complete: further keys of config.json.
    """

    name: str
    architecture: str
    model_type: str
    tensors: dict[str, str]
    keys: frozenset[str] = frozenset()
    ropes: tuple[str, ...] = ()
    permuted: bool = False
    norm_offset: float = 0.0
    complete: Callable[[Header, dict[str, Any]], dict[str, Any]] = lambda header, config: config


def _gemma3(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    """As llama.cpp reads it: the period is 6 and sliding layers rotate by 10000 unless the file says otherwise."""
    meta, heads = header.metadata, config["num_attention_heads"]
    pattern = meta.get("gemma3.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        kinds = [SLIDING if slides else FULL for slides in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        kinds = kinds_by_period(config, pattern)
    else:
        raise UserError(f"{header.path}: gemma3.attention.sliding_window_pattern {pattern!r} means nothing")
    largest = config["num_hidden_layers"] == _GEMMA_27B_LAYERS
    local = {"rope_type": "default", "rope_theta": float(meta.get("gemma3.rope.freq_base_swa", 10000.0))}
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // heads if largest else config["head_dim"],
        "sliding_window": header.need("gemma3.attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: local},
        "final_logit_softcapping": meta.get("gemma3.final_logit_softcapping"),
    }
    return {key: value for key, value in config.items() if key != "hidden_act"} | own


_GEMMA_KEYS = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")
_GEMMA_KEYS += ("final_logit_softcapping",)
FAMILIES = {
    family.name: family
    for family in (
        GGUFFamily("llama", "LlamaForCausalLM", "llama", _BLOCK, permuted=True),
        GGUFFamily("qwen2", "Qwen2ForCausalLM", "qwen2", _BLOCK | _BIASES, ropes=("yarn",)),
        GGUFFamily("qwen3", "Qwen3ForCausalLM", "qwen3", _BLOCK | _HEAD_NORMS, ropes=("yarn",)),
        GGUFFamily(
            name="gemma3",
            architecture="Gemma3ForCausalLM",
            model_type="gemma3_text",
            tensors=_ATTENTION | _HEAD_NORMS | _SANDWICH | _MLP,
            keys=frozenset(_GEMMA_KEYS),
            norm_offset=1.0,
            complete=_gemma3,
        ),
    )
}
