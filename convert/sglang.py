"""SGLang's draft layout, which SpecForge and SpecJAX write and sglang-jax and tpu-inference read too.

`midlayer.*` names, ids in `eagle_config`. The servers look tensors up by exact name and ignore what they do not know,
so a flag or name they lack costs acceptance without an error: such drafts are refused here.
"""

import re
import shlex
from typing import Any

from convert import flat
from eagle3_jax.draft.draft import Draft, stored_tensors
from eagle3_jax.draft.folder import Tensors
from eagle3_jax.errors import UserError
from eagle3_jax.taps import TapSet, to_block_outputs

ARCHITECTURE = "LlamaForCausalLMEagle3"
RULES = ("always", "first-is-1")
_CANNOT = ("norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias", "qk_norm", "sliding_window")

read = flat.read


def looks_like(raw: dict[str, Any], names: set[str]) -> bool:
    return any("Eagle3" in name for name in raw.get("architectures") or []) or "eagle_config" in raw


def layer_ids(taps: TapSet, rule: str | None) -> list[int]:
    """The ids under which SGLang captures these taps.

    rule: "always" = the older SGLang, which adds one to every id; "first-is-1" = the newer, which does so only where
    the first id is 1; None = only what means the same to both. Raises UserError for what cannot be said.
    """
    points = list(taps)
    if 0 in points:
        raise UserError(f"SGLang cannot capture the embedding, and the draft reads {taps.words()} / serve it elsewhere")
    check_ascending(taps, "SGLang")
    outputs = to_block_outputs(taps)
    if points[0] == 2:
        return outputs
    if rule is None:
        raise UserError(
            f"taps {points} need other ids in the older SGLang, which adds one to each ({outputs}), and in the newer, "
            f"which does so only where the first id is 1 ({points}) / choose with --sglang-rule always or first-is-1"
        )
    if rule == "first-is-1" and points[0] == 1:
        raise UserError(f"SGLang's rule first-is-1 would read ids {points} as {[p + 1 for p in points]} / use always")
    return outputs if rule == "always" else points


def check_ascending(taps: TapSet, system: str) -> None:
    """UserError for taps in another order than the one in which a model is run through."""
    if list(taps) != sorted(taps):
        raise UserError(
            f"{system} captures taps in ascending order, and the draft reads {list(taps)} / serve it elsewhere"
        )


def write(draft: Draft, rule: str | None = None) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors for SGLang. Raises UserError naming every option that it cannot express."""
    refused = flat.unsupported(draft, _CANNOT)
    if refused:
        raise UserError(f"SGLang cannot express {', '.join(refused)} and would ignore it / convert to speculators")
    config = draft.config
    eagle: dict[str, Any] = {"use_aux_hidden_state": config.use_aux_hidden_state}
    if config.use_aux_hidden_state:
        eagle["eagle_aux_hidden_state_layer_ids"] = layer_ids(draft.taps, rule)
    raw = flat.write(draft, ARCHITECTURE, eagle)
    raw |= {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": config.fc_norm, "bias": config.fc_bias}
    if config.norm_output:  # never false: SpecForge, resuming from it, would leave out the final norm
        raw["norm_output"] = True
    if len(draft.taps) != 3:
        raw["num_aux_hidden_states"] = len(draft.taps)
    return raw, {_name(name): array for name, array in stored_tensors(draft).items()}


def _name(canonical: str) -> str:
    later = re.fullmatch(r"(layers\.[1-9]\d*)\.input_layernorm\.weight", canonical)
    if later:
        return f"{later[1]}.hidden_norm.weight"
    return re.sub(r"^layers\.0\.", "midlayer.", canonical)


def serve_command(draft: Draft, path: str, target: str) -> str:
    """The launch command that serves the written draft as a chain."""
    tokens = draft.facts.get("speculative_tokens") or 3
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {shlex.quote(path)} --speculative-num-steps {tokens} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
    )
