"""The speculators layout, which is also ours and vLLM's: reading and writing live in `eagle3_jax.draft`."""

import json
import shlex
from typing import Any

from convert import flat
from eagle3_jax.draft.config import draft_config_to_speculators
from eagle3_jax.draft.draft import Draft, own_facts, stored_tensors
from eagle3_jax.draft.folder import Tensors
from eagle3_jax.errors import UserError

_CANNOT = ("bias", "use_aux_hidden_state")


def looks_like(raw: dict[str, Any], names: set[str]) -> bool:
    return "speculators_model_type" in raw or "transformer_layer_config" in raw


def write(draft: Draft) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors for speculators and vLLM. Raises UserError naming every option they cannot express."""
    refused = flat.unsupported(draft, _CANNOT)
    if refused:
        raise UserError(f"speculators cannot express {', '.join(refused)} / convert to sglang")
    tokens = draft.facts.get("speculative_tokens") or 3
    verifier = draft.facts.get("verifier") or {"name_or_path": None, "architectures": ["LlamaForCausalLM"]}
    raw = draft_config_to_speculators(draft.config, str(draft.dtype), tokens, verifier, own_facts(draft))
    return raw, stored_tensors(draft)


def serve_command(draft: Draft, path: str, target: str) -> str:
    """The `vllm serve` command for the written draft."""
    tokens = draft.facts.get("speculative_tokens") or 3
    config = json.dumps({"method": "eagle3", "model": path, "num_speculative_tokens": tokens})
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"
