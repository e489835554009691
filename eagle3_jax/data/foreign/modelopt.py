"""NVIDIA ModelOpt's dumps, one `{conversation_id}.pt` a document.

    {"input_ids": [T], "hidden_states": [T, H], "aux_hidden_states": [T, A*H], "loss_mask": [T], "conversation_id"}

`hidden_states` is the last hidden state: after the final norm in the dumps of the Hugging Face script, before it in
those of the vLLM script; only files with `hidden_states_prenorm` say which. Ids in its configs name block outputs.
"""

from pathlib import Path
from typing import Any

from eagle3_jax.data.foreign.sample import Sample, Says, fused_states, is_tensor
from eagle3_jax.errors import UserError

NAME = "ModelOpt (aux_hidden_states, hidden_states)"


def matches(content: dict[str, Any]) -> bool:
    return "input_ids" in content and all(is_tensor(content.get(key)) for key in ("hidden_states", "aux_hidden_states"))


def read(path: Path, content: dict[str, Any]) -> Sample:
    before = content.get("hidden_states_prenorm")
    if is_tensor(before):
        before = bool(before.read())
    if before is not None and not isinstance(before, bool):
        raise UserError(f"hidden_states_prenorm is {before!r} / {path} / expected true or false")
    last = {None: None, True: "pre-norm", False: "post-norm"}[before]
    says = Says(last_hidden=last, where="hidden_states_prenorm" if last else "")
    return fused_states(path, content, "aux_hidden_states", "hidden_states", NAME, says)
