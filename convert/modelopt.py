"""NVIDIA ModelOpt's export: `layers.0.*` names, ids in `eagle_config` as block outputs, no t2d, d2t in any order."""

from typing import Any

from convert import flat, sglang
from eagle3_jax.draft.draft import Draft, stored_tensors
from eagle3_jax.draft.folder import Tensors
from eagle3_jax.errors import UserError
from eagle3_jax.taps import to_block_outputs

ARCHITECTURE = "LlamaForCausalLMEagle3"
_CANNOT = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "bias", "use_aux_hidden_state"),
    *("qk_norm", "sliding_window"),
)

read = flat.read
serve_command = sglang.serve_command


def looks_like(raw: dict[str, Any], names: set[str]) -> bool:
    eagle = raw.get("eagle_config") or {}
    return (
        "next_layer_regular" in eagle
        or "use_last_layernorm" in eagle
        or (sglang.looks_like(raw, names) and "t2d" not in names and "layers.0.hidden_norm.weight" in names)
    )


def write(draft: Draft) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors as ModelOpt exports them. Raises UserError naming every option that it cannot express."""
    refused = flat.unsupported(draft, _CANNOT)
    if refused:
        raise UserError(f"ModelOpt cannot express {', '.join(refused)} / convert to speculators")
    sglang.check_ascending(draft.taps, "ModelOpt")
    eagle = {
        "eagle_aux_hidden_state_layer_ids": to_block_outputs(draft.taps),
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    }
    tensors = {name: array for name, array in stored_tensors(draft).items() if name != "t2d"}
    return flat.write(draft, ARCHITECTURE, eagle), tensors
