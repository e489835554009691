"""SpecForge's offline samples, `rows_{a}-{b}/data_{i}.ckpt` or `.ckpt.gz`.

    {"input_ids": [T], "loss_mask": [T], "hidden_state": [1, T, H], "aux_hidden_state": [1, T, 3H]}

`hidden_state` is the *last* hidden state (what SGLang gives its head: after the final norm, by the code of the version
read here), `aux_hidden_state` the draft's input. Ids in SpecForge's configs name block outputs.
"""

from pathlib import Path
from typing import Any

from eagle3_jax.data.foreign.sample import Sample, Says, fused_states, is_tensor

NAME = "SpecForge (aux_hidden_state, hidden_state)"


def matches(content: dict[str, Any]) -> bool:
    return "input_ids" in content and all(
        is_tensor(content.get(key), 2, 3) for key in ("hidden_state", "aux_hidden_state")
    )


def read(path: Path, content: dict[str, Any]) -> Sample:
    return fused_states(path, content, "aux_hidden_state", "hidden_state", NAME, Says())
