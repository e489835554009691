"""response_format as a grammar over tokens, through llguidance (extra `structured`)."""

import json
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from eagle3_jax.errors import UserError
from eagle3_jax.serving.api.errors import ApiError

_ANY_OBJECT = {"type": "object"}
# Between the parts of a JSON text: as compact and as indented writers do it. Without a bound some models never stop.
_BLANKS = {"whitespace_pattern": r"( |\n {0,32})?"}
_LONGEST = 65_536  # characters of a schema: one of 2,000 properties takes two seconds, of 5,000 fifteen
_FUEL = 200_000  # of a pattern's automaton: a second at most


class JsonGrammar:
    """One answer's place in its grammar (a `serving.requests.Grammar`). Raises UserError if it cannot go on.

    vocab_size: the model's; tokens: ids that the matcher knows of.
    """

    def __init__(self, matcher: Any, vocab_size: int, tokens: int):
        self._matcher, self._vocab_size = matcher, vocab_size
        self._bits = np.zeros((1, -(-tokens // 32)), np.int32)

    def mask(self) -> np.ndarray:
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        return np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")[: self._vocab_size].astype(bool)

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(f"response_format: {_reason(self._matcher)}")


def json_schema(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The schema that an answer must meet, None for free text. Raises ApiError for any other format."""
    given = {"type": "text"} if response_format is None else response_format
    kind, named = given.get("type"), given.get("json_schema")
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind in ("text", "json_object", "json_schema"):
        _check_keys(given, allowed, "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind != "json_schema" or not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        known = "text, json_object, or json_schema with json_schema: {name, schema}"
        raise ApiError(400, f"response_format: use {known}", "response_format")
    _check_keys(named, {"name", "schema", "strict", "description"}, "response_format.json_schema")
    for key, types, words in (("name", str, "text"), ("description", str, "text"), ("strict", bool, "true or false")):
        if not isinstance(named.get(key), types | None):
            raise ApiError(400, f"response_format.json_schema.{key} must be {words}", "response_format")
    return named["schema"]


def _check_keys(given: dict[str, Any], allowed: set[str], where: str) -> None:
    unknown = [key for key, value in given.items() if key not in allowed and value is not None]
    if unknown:
        raise ApiError(400, f"{where}.{unknown[0]} is not supported", "response_format")


class Grammars:
    """Makes grammars for a tokenizer; `new` may take a second and is to be called in a thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]):
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._tokens = max(vocab_size, 1 + max(tokenizer.get_vocab().values()))  # some have more than the model
        self._known: Any = None  # the tokenizer in llguidance's form

    def new(self, schema: dict[str, Any]) -> Callable[[], JsonGrammar]:
        """Makes a grammar for each choice of an answer. Raises ApiError for a schema that is not supported."""
        try:
            from llguidance import LLMatcher, LLParserLimits
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ApiError(
                400, "response_format needs the extra `structured`: pip install 'eagle3-jax[structured]'"
            ) from error
        if not self._eos:
            raise ApiError(400, "response_format: the model has no end token, so its answers could not end")
        if self._known is None:
            self._known = from_tokenizer(self._tokenizer, n_vocab=self._tokens, eos_token=self._eos)
        if len(text := json.dumps(schema)) > _LONGEST:
            message = f"response_format: the schema takes {len(text)} characters, the most is {_LONGEST}"
            raise ApiError(400, message, "response_format")
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=_BLANKS)
        except ValueError as error:
            raise ApiError(400, f"response_format: {error}", "response_format") from error
        limits = LLParserLimits(initial_lexer_fuel=_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._known, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ApiError(400, f"response_format: {_reason(matcher)}", "response_format")
        try:
            begins = self._begun(matcher).mask().any()
        except UserError as error:  # some schemas fail only now, such as {"$ref": "#"}
            raise ApiError(400, str(error), "response_format") from error
        if not begins:
            raise ApiError(400, "response_format: nothing meets the schema", "response_format")
        return lambda: self._begun(matcher)

    def _begun(self, matcher: Any) -> JsonGrammar:
        return JsonGrammar(matcher.deep_copy(), self._vocab_size, self._tokens)


def _reason(matcher: Any) -> str:
    return " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())[:300]
