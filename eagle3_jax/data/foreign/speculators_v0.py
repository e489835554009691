"""The oldest samples of speculators: {"input_ids", "loss_mask", "hidden_state": [T, A*H], "target": [T, H]}.

SpecForge's trainer uses the same two names after normalising a file. `hidden_state` is the draft's input here and the
teacher's state in SpecForge's files: the keys beside it tell which.
"""

from pathlib import Path
from typing import Any

from eagle3_jax.data.foreign.sample import Sample, Says, fused_states, is_tensor

NAME = "speculators v0 (hidden_state, target)"


def matches(content: dict[str, Any]) -> bool:
    return (
        "input_ids" in content
        and is_tensor(content.get("hidden_state"), 2, 3)
        and is_tensor(content.get("target"), 2, 3)
    )


def read(path: Path, content: dict[str, Any]) -> Sample:
    return fused_states(path, content, "hidden_state", "target", NAME, Says())
