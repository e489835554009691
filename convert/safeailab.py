"""The layout of the authors' research code (SafeAILab/EAGLE): `midlayer.*` names, a plain Llama config, no layer ids.

Its code taps the inputs of blocks 2, N//2 and N-3 whatever the file says, and knows none of the later options.
"""

import re
from typing import Any

from convert import flat
from eagle3_jax.draft.draft import Checkpoint, Draft, stored_tensors
from eagle3_jax.draft.folder import Tensors, canonical_names
from eagle3_jax.errors import UserError

ARCHITECTURE = "LlamaForCausalLM"
_CANNOT = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "bias", "use_aux_hidden_state"),
    *("attention_bias", "mlp_bias", "qk_norm", "sliding_window", "num_hidden_layers"),
)


def read(raw: dict[str, Any], stored: Tensors, where: str, *settled) -> Checkpoint:
    """A draft of the research code. Its num_hidden_layers may be the target's (the Vicuna draft says 40): the code
    always builds one layer; and it reads `bias` but builds fc without one, so the tensor tells. settled: see flat.read.
    """
    has_bias = "fc.bias" in canonical_names(stored, where)
    return flat.read({**raw, "bias": has_bias}, stored, where, *settled, counts_layers=False)


def looks_like(raw: dict[str, Any], names: set[str]) -> bool:
    return any(re.search(r"(^|\.)(d2t$|midlayer\.|layers\.0\.hidden_norm\.)", name) for name in names)


def write(draft: Draft, num_layers: int | None = None) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors for the research code. num_layers: of the target, where known.

    Raises UserError naming every option that it cannot express.
    """
    refused = flat.unsupported(draft, _CANNOT) + _shape_limits(draft) + _tap_limits(draft, num_layers)
    if refused:
        raise UserError(f"SafeAILab's code cannot express {', '.join(refused)} / convert to speculators")
    raw = flat.write(draft, ARCHITECTURE, None)
    if raw["rope_scaling"]:
        raw["rope_scaling"] = {"type": raw["rope_scaling"]["rope_type"], "factor": raw["rope_scaling"]["factor"]}
    tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): array for name, array in stored_tensors(draft).items()}
    return raw, tensors


def _shape_limits(draft: Draft) -> list[str]:
    config, decoder = draft.config, draft.config.decoder
    limits, rope = [], decoder.rope
    if decoder.head_dim * decoder.num_heads != decoder.hidden_size:
        limits.append(f"head_dim {decoder.head_dim} (it takes hidden_size / heads)")
    if rope.get("mrope_section"):
        limits.append("mrope_section")
    if rope.kind not in ("default", "linear", "dynamic"):
        limits.append(f"rope type {rope.kind}")
    elif rope.kind != "default" and rope.theta != 10000.0:
        limits.append(f"rope_theta {rope.theta:g} with rope type {rope.kind} (it takes 10000)")
    if 3 * config.target_hidden_size == decoder.hidden_size:
        limits.append("a hidden_size of three times the target's (it then leaves out fc)")
    return limits


def _tap_limits(draft: Draft, num_layers: int | None) -> list[str]:
    points = list(draft.taps)
    implied = points[-1] + 3
    if len(points) != 3 or points != [2, implied // 2, implied - 3]:
        return [f"taps {points} (it reads 2, N//2 and N-3)"]
    if num_layers not in (None, implied):
        return [f"taps {points} on {num_layers} blocks (it reads {[2, num_layers // 2, num_layers - 3]})"]
    return []


def serve_command(draft: Draft, path: str, target: str) -> str:
    """How to load the written draft there."""
    return f"EaModel.from_pretrained(base_model_path={target!r}, ea_model_path={path!r}, use_eagle3=True)"
