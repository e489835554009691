"""What one request asks for: sampling settings, length, stops; checking them, and their device form for a batch."""

import dataclasses
import operator
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.sampling import MinTokens, Penalties, Random, Sampling

_WHOLE = ("max_new_tokens", "top_k", "min_tokens")
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LARGEST = float(np.finfo(np.float32).max)
_GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing by them would overflow float32


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request; `eagle3_jax.generate` takes one, or one for each prompt.

    temperature: 0 = greedy. top_p in (0, 1], top_k (0 = off), min_p in [0, 1): tokens at least min_p times as likely
    as the likeliest. repetition_penalty (0.01 to 100, 1 = off): logits of tokens in prompt or answer divided by it if
    positive, else multiplied. presence_penalty, frequency_penalty (0 = off): subtracted from the logits of tokens in
    the answer, once, and for each time. logit_bias: {token id: added to its logit}. min_tokens: no stop token before so
    many. seed: None = a random one. stop_token_ids: None = the target's end tokens, () = never stop.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None

    def stops(self, target: Target) -> frozenset[int]:
        return frozenset(target.eos_token_ids if self.stop_token_ids is None else self.stop_token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def is_neutral(self) -> bool:
        """Greedy, and the logits stay as they are: nothing is needed on the device."""
        changed = any(getattr(self, name) != getattr(SamplingParams, name) for name in (*_PENALTIES, "min_tokens"))
        return self.is_greedy and not self.logit_bias and not changed


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises UserError for a setting of a wrong type or out of its range; NaN is out of every range."""
    for names, kind, rule in ((_WHOLE, Integral, "a whole number"), (_REAL, Real, "a number")):
        for name in names:
            _require(isinstance(getattr(params, name), kind), params, name, rule)
    _check_seed(params)
    if params.max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {params.max_new_tokens} / it must be at least 1")
    ranges = {
        "temperature": (0 <= params.temperature <= _LARGEST, "0 or more"),
        "top_p": (0 < params.top_p <= 1, "in (0, 1]"),
        "top_k": (params.top_k >= 0, "0 (off) or more"),
        "min_p": (0 <= params.min_p < 1, "in [0, 1)"),
        "repetition_penalty": (0.01 <= params.repetition_penalty <= 100, "between 0.01 and 100"),
        "presence_penalty": (abs(params.presence_penalty) <= _LARGEST, "a finite number"),
        "frequency_penalty": (abs(params.frequency_penalty) <= _LARGEST, "a finite number"),
        "min_tokens": (0 <= params.min_tokens <= params.max_new_tokens, "between 0 and max_new_tokens"),
        "logit_bias": (isinstance(params.logit_bias, Mapping | None), "a mapping of token ids to numbers"),
        "stop_token_ids": (isinstance(params.stop_token_ids, Collection | None), "a list of token ids"),
    }
    for name, (good, rule) in ranges.items():
        _require(good, params, name, rule)

    def is_token(token: object) -> bool:
        return isinstance(token, Integral) and 0 <= token < vocab_size

    _check_bias(params.logit_bias or {}, vocab_size)
    stops = () if params.stop_token_ids is None else params.stop_token_ids
    if outside := [token for token in stops if not is_token(token)]:
        raise UserError(f"stop_token_ids: {outside[0]} is outside 0..{vocab_size - 1} / name token ids of the target")


def _check_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    """A bias may name all of a vocabulary, so that the types are looked at together."""

    def are(kind: type, values: Iterable) -> bool:
        return all(issubclass(found, kind) for found in set(map(type, values)))

    good = are(Integral, bias) and are(Real, bias.values()) and all(0 <= token < vocab_size for token in bias)
    if not good or not all(abs(value) <= _LARGEST for value in bias.values()):
        raise UserError(f"sampling setting logit_bias / it must map ids in 0..{vocab_size - 1} to finite numbers")


def _check_seed(params: SamplingParams) -> None:
    _require(isinstance(params.seed, Integral | None), params, "seed", "a whole number")


def _require(good: bool, params: SamplingParams, name: str, rule: str) -> None:
    if not good:
        raise UserError(f"sampling setting {name} {getattr(params, name)} / it must be {rule}")


def token_ids(prompt: Sequence[int]) -> list[int]:
    """A prompt as a list of whole numbers, from any sequence or array of them. Raises UserError for anything else."""
    try:
        return list(map(operator.index, prompt))
    except TypeError as error:
        raise UserError(f"prompt_ids holds {str(prompt)[:40]!r} / give whole numbers, as the tokenizer does") from error


def check_prompt(number: int, prompt: list[int], target: Target) -> None:
    window, vocabulary = target.config.max_positions, target.config.vocab_size
    if not prompt:
        raise UserError(f"prompt {number} is empty / give at least one token")
    if len(prompt) >= window:
        raise UserError(f"prompt {number} has {len(prompt)} tokens, the target's context is {window} / shorten it")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise UserError(f"prompt {number} has token ids outside 0..{vocabulary - 1} / use the target's own tokenizer")


def spread(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Settings for each of `count` requests. One set for all: request i uses seed + i."""
    if isinstance(params, SamplingParams):
        _check_seed(params)
        seed = secrets.randbits(31) if params.seed is None else params.seed
        return [dataclasses.replace(params, seed=seed + i) for i in range(count)]
    if len(params) != count:
        raise UserError(f"{len(params)} sampling settings for {count} prompts / give one, or one for each prompt")
    return [p if p.seed is not None else dataclasses.replace(p, seed=secrets.randbits(31)) for p in params]


def cut(new: Sequence[int], room: int, stops: Collection[int]) -> tuple[list[int], str | None]:
    """The tokens of a block that count, and why the answer ends with them, if it does: "stop" with the first stop
    token, wherever in the block it lies, which is kept; "length" with the last token that there is room for."""
    for count, token in enumerate(new, start=1):
        if token in stops or count >= room:
            return list(new[:count]), "stop" if token in stops else "length"
    return list(new), None


def bias_row(bias: Mapping[int, float] | None, vocab_size: int) -> np.ndarray:
    """What a bias adds to the logits, f32 [V]. It may name all of a vocabulary: no loop over its tokens."""
    row = np.zeros(vocab_size, np.float32)
    if bias:
        row[np.fromiter(bias.keys(), np.int64, len(bias))] = np.fromiter(bias.values(), np.float32, len(bias))
    return row


def device_sampling(
    target: Target, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], complete: bool = False
) -> Sampling | None:
    """The batch's settings as arrays; None where all requests are greedy and nothing else is set.

    complete: no field is None, whatever is used: one shape for all settings.
    """
    size, vocabulary = len(params), target.config.vocab_size
    random = penalties = bias = minimum = None

    def column(name: str) -> jax.Array:
        return jnp.asarray([getattr(p, name) for p in params], jnp.float32)

    def used(*names: str) -> bool:
        return complete or any(getattr(p, name) != getattr(SamplingParams, name) for p in params for name in names)

    if complete or not all(p.is_greedy for p in params):
        keys = jax.vmap(jax.random.key)(jnp.asarray([p.seed % 2**32 for p in params], jnp.uint32))
        temperature = jnp.asarray([0.0 if p.is_greedy else p.temperature for p in params], jnp.float32)
        top_k = jnp.asarray([min(p.top_k, vocabulary) for p in params], jnp.int32) if used("top_k") else None
        limits = (column("top_p") if used("top_p") else None, column("min_p") if used("min_p") else None)
        random = Random(keys, temperature, top_k, *limits)
    if used(*_PENALTIES):
        seen = np.zeros((size, vocabulary), bool)
        for row, prompt in zip(seen, prompts, strict=True):
            row[list(prompt)] = True
        rates = [column(name) for name in _PENALTIES]
        penalties = Penalties(*rates, jnp.asarray(seen), jnp.zeros((size, vocabulary), jnp.int32))
    if complete or any(p.logit_bias for p in params):
        bias = jnp.asarray(np.stack([bias_row(p.logit_bias, vocabulary) for p in params]))
    if used("min_tokens"):
        stops = np.zeros((size, vocabulary), bool)
        for row, p in zip(stops, params, strict=True):
            row[list(p.stops(target))] = True
        window = target.config.max_positions
        until = [len(prompt) + min(p.min_tokens, window) for prompt, p in zip(prompts, params, strict=True)]
        minimum = MinTokens(jnp.asarray(until, jnp.int32), jnp.asarray(stops))
    sampling = Sampling(random, penalties, bias, minimum)
    return None if all(part is None for part in sampling) else sampling
