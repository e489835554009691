"""A body's settings as SamplingParams. What a body leaves out has OpenAI's default: temperature 1, top_p 1.

The model's generation_config.json suggests no values here (vLLM takes them from it): `eagle3 serve` prints them.
"""

import re
from collections.abc import Collection, Iterable

from eagle3_jax.serving.api.errors import ApiError
from eagle3_jax.serving.api.fields import ChatBody, CompletionBody
from eagle3_jax.speculate.request import SamplingParams

_TOKEN = re.compile("0|[1-9][0-9]{0,8}")


def sampling_params(
    body: ChatBody | CompletionBody, eos_token_ids: Collection[int], vocab_size: int, max_new_tokens: int
) -> SamplingParams:
    """stop_token_ids are stops besides the model's end tokens, as in vLLM; ignore_eos leaves the latter out.

    Raises ApiError, naming the field, for tokens that the model has not and a min_tokens above the answer's length.
    """
    if (body.min_tokens or 0) > max_new_tokens:
        raise ApiError(400, f"min_tokens {body.min_tokens} is more than max_tokens {max_new_tokens}", "min_tokens")
    stops = (() if body.ignore_eos else tuple(eos_token_ids)) + tuple(body.stop_token_ids or ())
    _check_tokens("stop_token_ids", body.stop_token_ids or (), vocab_size)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        min_tokens=body.min_tokens or 0,
        seed=body.seed,
        stop_token_ids=stops,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float] | None:
    if not all(map(_TOKEN.fullmatch, given)):
        raise ApiError(400, "logit_bias: its keys are token ids", "logit_bias")
    bias = {int(token): value for token, value in given.items()}
    _check_tokens("logit_bias", bias, vocab_size)
    return bias or None


def _check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ApiError(400, f"{name}: token {outside} is outside 0..{vocab_size - 1}", name)
