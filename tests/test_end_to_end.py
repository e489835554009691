"""The real SmolLM2-135M-Instruct from its GGUF: weights, tokenizer, template and decoding together say the truth."""

import pytest

import eagle3_jax as e3
from eagle3_jax.data.template import prompt_ids


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_model_knows_the_capital_of_france() -> None:
    target = e3.load_target("demo")
    prompt = prompt_ids(target.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    result = e3.generate(target, None, prompt, max_new_tokens=12)
    assert target.tokenizer.decode(result.tokens, skip_special_tokens=True) == "The capital of France is Paris."
    assert result.finish_reason == "stop" and result.tokens[-1] in target.eos_token_ids
