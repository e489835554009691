"""LongRoPE where texts grow past the original window: all keys of a text have the same factors, those of the length
that it may come to, in generation, in the engine and in training."""

import asyncio
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.models.target import TargetOutput
from eagle3_jax.serving.engine import Engine
from eagle3_jax.serving.requests import Request, Settings
from eagle3_jax.taps import TapSet
from eagle3_jax.training.features import run_target
from tests.tiny import bigram_draft, bigram_target, ids_of, relative

BORDER = 16
LONG = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": BORDER}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
SHORT_PROMPT, LONG_PROMPT = ids_of(0, 6, vocab_size=32).tolist(), ids_of(1, 20, vocab_size=32).tolist()
# Up to the border, over it while growing, and beyond it from the first token.
REQUESTS = [(SHORT_PROMPT, BORDER - 6), (SHORT_PROMPT, 20), (LONG_PROMPT, 10)]


@pytest.fixture(scope="module")
def target() -> e3.Target:
    return bigram_target(32, context=2.0, rope_parameters=LONG, max_position_embeddings=64)


@pytest.fixture(scope="module")
def answers(target) -> list[list[int]]:
    prompts, new = zip(*REQUESTS, strict=True)
    params = [e3.SamplingParams(count, stop_token_ids=()) for count in new]
    draft = bigram_draft(target, noise=0.05)
    return [r.tokens for r in e3.generate(target, draft, prompts, strategy="chain:2", sampling=params)]


def whole(target: e3.Target, text: list[int], reach: int) -> TargetOutput:
    """A forward over the text, padded to 32 tokens: one shape to compile."""
    return target.forward(np.asarray([text + [0] * (32 - len(text))]), taps=(0, 1), lengths=[reach])


def test_an_answer_is_what_whole_forwards_with_the_factors_of_its_end_say(target, answers) -> None:
    for (prompt, new), answer in zip(REQUESTS, answers, strict=True):
        logits = whole(target, prompt + answer, len(prompt) + new).logits[0]
        choices = np.argmax(logits[len(prompt) - 1 : len(prompt + answer) - 1], axis=-1)
        assert choices.tolist() == answer
    short, long = (whole(target, SHORT_PROMPT, reach).logits[:, :6] for reach in (BORDER, BORDER + 1))
    assert relative(short, long) > 0.01


def test_the_engine_answers_the_same_and_reuses_no_keys_of_other_factors(target, answers) -> None:
    engine = Engine(target, None, Settings(slots=1, max_len=40, strategy="plain", chunk=4))
    engine.start()

    async def ask(number: int, prompt: list[int], new: int) -> list[int]:
        params = e3.SamplingParams(new, stop_token_ids=())
        deltas = engine.stream(Request(str(number), tuple(prompt), params))
        return [token async for delta in deltas for token in delta.tokens]

    async def ask_all() -> list[list[int]]:
        return [await ask(i, *request) for i, request in enumerate(REQUESTS)]

    while engine.state == "warming":
        time.sleep(0.05)
    try:
        assert asyncio.run(ask_all()) == answers
    finally:
        asyncio.run(engine.drain(5))


def test_documents_of_a_packed_row_have_the_factors_of_their_own_lengths(target) -> None:
    texts = [LONG_PROMPT, SHORT_PROMPT]
    ids = jnp.asarray([LONG_PROMPT + SHORT_PROMPT])
    documents = jnp.asarray([[0] * len(LONG_PROMPT) + [1] * len(SHORT_PROMPT)])
    forward = jax.jit(run_target, static_argnums=(0, 1))
    taps, _ = forward(target.graph, TapSet((0, 1)), target.params, ids, documents)
    start = 0
    for text in texts:
        alone = whole(target, text, len(text)).taps.arrays[1][:, : len(text)]
        assert relative(taps.arrays[1][:, start : start + len(text)], alone) < 1e-5
        start += len(text)
