"""A body's settings as SamplingParams. What a body leaves out has OpenAI's default: temperature 1, top_p 1.

The model's generation_config.json suggests no values here (vLLM takes them from it): `eagle3 serve` prints them.
"""

import re
from collections.abc import Collection

from eagle3_jax.serving.api.errors import ApiError
from eagle3_jax.serving.api.fields import ChatBody, CompletionBody
from eagle3_jax.speculate.request import SamplingParams


def sampling_params(
    body: ChatBody | CompletionBody, eos_token_ids: Collection[int], max_new_tokens: int
) -> SamplingParams:
    """stop_token_ids are stops besides the model's end tokens, as in vLLM; ignore_eos leaves the latter out."""
    stops = (() if body.ignore_eos else tuple(eos_token_ids)) + tuple(body.stop_token_ids or ())
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}),
        min_tokens=body.min_tokens or 0,
        seed=body.seed,
        stop_token_ids=stops,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(given: dict[str, float]) -> dict[int, float] | None:
    if not all(re.fullmatch("[0-9]{1,9}", token) for token in given):
        raise ApiError(400, "logit_bias: its keys are token ids", "logit_bias")
    return {int(token): bias for token, bias in given.items()} or None
