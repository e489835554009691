"""What the body of a request may hold: types and defaults. A field that is not here is refused, never ignored.

null counts as not given, as with OpenAI, in objects within the body as well. Fields that say who asks and change no
answer (`user`, `metadata`) are taken.
"""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3_jax.serving.api import strict_json
from eagle3_jax.serving.api.errors import ApiError

MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
_MOST_STOPS, _LONGEST_STOP, _MOST_STOP_TOKENS = 32, 1024, 1024

Penalty = Annotated[float, Field(ge=-2, le=2)] | None
_LARGEST = 3.4e38  # of a float32


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name not in cls.model_fields}

    def check(self) -> None:
        """Raises ApiError for values that do not go together."""


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Eagle3Options(Strict):
    """strategy: None = the server's. stats: each streamed piece says which tokens the draft guessed."""

    strategy: str | None = None
    stats: bool = False


class Sampled(Strict):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=_LARGEST)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=_MOST_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: dict[str, Any] | None = None
    eagle3: Eagle3Options | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only allowed with stream: true", "stream_options")
        if len(self.stops) > _MOST_STOPS or any(not 0 < len(stop) <= _LONGEST_STOP for stop in self.stops):
            rule = f"at most {_MOST_STOPS} strings of 1 to {_LONGEST_STOP} characters"
            raise ApiError(400, f"stop: give {rule}", "stop")


class ChatBody(Sampled):
    prompt_field: ClassVar[str] = "messages"
    default_longest: ClassVar[float] = math.inf  # most tokens of an answer where none are asked for

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def longest(self) -> int | None:
        """Most tokens asked for; None: `default_longest`, or what fits."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is only allowed with logprobs: true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", "max_tokens")


class CompletionBody(Sampled):
    prompt_field: ClassVar[str] = "prompt"
    default_longest: ClassVar[float] = 16

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    best_of: int | None = None

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of is not supported: leave it out, or give the value of n", "best_of")
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported: the prompt's are not computed", "echo")


class TokenizeBody(Strict):
    """Either a prompt or messages. Tools and variables go with messages, whose template writes all special tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        kind = "prompt" if self.messages is None else "messages"
        for name in ("tools", "chat_template_kwargs") if self.messages is None else ("add_special_tokens",):
            if getattr(self, name):
                raise ApiError(400, f"{name} does not go with {kind}", name)


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: list[int]


def parse(kind: type[Strict], raw: bytes) -> Any:
    """The body of a request as `kind`. Raises ApiError for anything but a JSON object of known fields."""
    content = _json(raw)
    if not isinstance(content, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(content).__name__}")
    unsupported = _UNSUPPORTED - kind.model_fields.keys()
    given = {name: value for name, value in content.items() if value is not None or name not in unsupported}
    if refused := [name for name in given if name in unsupported]:
        raise ApiError(400, f"{refused[0]} is not supported by this server", refused[0], "unsupported_parameter")
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise _readable(error) from error
    body.check()
    return body


# Fields of OpenAI's and vLLM's that this server has not; null is taken for them.
_UNSUPPORTED = {
    *("audio", "function_call", "functions", "prediction", "reasoning_effort", "verbosity", "web_search_options"),
    *("suffix", "best_of", "moderation", "prompt_cache_options", "structured_outputs", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "prompt_logprobs", "use_beam_search", "length_penalty", "skip_special_tokens"),
    *("include_stop_str_in_output", "continue_final_message", "add_generation_prompt", "chat_template", "bad_words"),
    *("chat_template_kwargs", "truncate_prompt_tokens", "allowed_token_ids", "logits_processors"),
}


def _json(raw: bytes) -> Any:
    try:
        return strict_json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON in UTF-8: {error}") from error


def _readable(error: ValidationError) -> ApiError:
    """The first fault, with its place as param."""
    fault = error.errors(include_url=False, include_input=False)[0]
    branches = ("list[", "dict[")  # of a union; they stand in the place as well
    place = [str(part) for part in fault["loc"] if part != "str" and not str(part).startswith(branches)]
    param = ".".join(place) or None
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field: {param}", param, "unknown_parameter")
    return ApiError(400, f"{param}: {fault['msg'][0].lower()}{fault['msg'][1:]}", param)
