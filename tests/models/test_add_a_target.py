"""The playbook docs/add-a-target.md, followed to the letter with the family that it prints."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import eagle3_jax as e3
from eagle3_jax.models.weights import abstract_params
from tests.tiny import ids_of, random_tensors, target_config

PLAYBOOK = Path(__file__).resolve().parents[2] / "docs" / "add-a-target.md"


def test_the_printed_family_loads_and_runs(tmp_path: Path) -> None:
    file, tried = re.findall(r"```python\n(.*?)```", PLAYBOOK.read_text(), flags=re.DOTALL)
    toy: dict = {}
    exec(compile(file, "toy.py", "exec"), toy)
    family = toy["FAMILY"]

    sizes = {"num_hidden_layers": 2, "vocab_size": 64, "toy_window": 3, "model_type": "toy"}
    raw = target_config(architectures=[family.architecture], **sizes)
    _, shapes = abstract_params(nnx.eval_shape(lambda: family.build(family.read(raw, "here"))))
    tensors = random_tensors({name.replace(".mlp.", ".feed_forward."): shape for name, shape in shapes.items()}, 0)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(e3.UserError, match="ToyForCausalLM is not supported .* supported: LlamaForCausalLM"):
        e3.load_target(tmp_path)
    scope = {"e3": e3, "FAMILY": family, "folder": tmp_path, "ids": ids_of(0, 1, 8, vocab_size=64)}
    with jax.disable_jit():
        exec(tried, scope)
        far = scope["ids"].copy()
        far[0, 0] += 1
        moved = scope["target"].forward(far, taps=(1, 2))
    stream = scope["out"].taps.arrays
    assert scope["target"].config.windows == (3, None) and len(stream) == 3
    # Layer 0 sees three tokens, so that a change of the first reaches the third but not the fourth; layer 1 sees all.
    reached = np.any(np.asarray(moved.taps.arrays[0]) != np.asarray(stream[1]), axis=-1)[0]
    assert reached.tolist() == [True] * 3 + [False] * 5
    assert np.any(np.asarray(moved.taps.arrays[1][0, -1]) != np.asarray(stream[2][0, -1]))
