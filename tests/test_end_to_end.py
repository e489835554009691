"""The real SmolLM2-135M-Instruct from its GGUF: weights, tokenizer, template and blocks together say the truth.

That decoding says what a whole forward says is shown on tiny targets (tests/speculate, tests/models).
"""

import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.data.template import prompt_ids


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_model_knows_the_capital_of_france() -> None:
    target = e3.load_target("demo")
    prompt = prompt_ids(target.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    answer = target.tokenizer.encode("The capital of France is Paris.", add_special_tokens=False)
    choices = np.argmax(target.forward([prompt + answer]).logits[0, len(prompt) - 1 :], axis=-1).tolist()
    assert choices[:-1] == answer and choices[-1] in target.eos_token_ids
