"""response_format: masks that leave only what the schema allows, and bodies that are refused."""

import json
import sys

import numpy as np
import pytest

from eagle3_jax.errors import UserError
from eagle3_jax.serving.api.errors import ApiError
from eagle3_jax.serving.api.grammar import Grammars, json_schema
from tests.serving.fake_engine import END, HTTP, TOKENIZER, VOCAB, blocks, fake_server, ids

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["the", "ö"]}},
    "required": ["a"],
    "additionalProperties": False,
}
PADDED = VOCAB + 7  # models have rows without a token


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, PADDED, (END,))


def test_a_mask_follows_the_tokens(grammars):
    grammar = grammars.new(SCHEMA)()
    for token in ids('{"a": "ö"}'):
        mask = grammar.mask()
        assert mask.shape == (PADDED,) and mask.dtype == bool and mask[token] and not mask[END]
        assert not mask[ids("x")[0]] and not mask[VOCAB:].any()
        grammar.advance(token)
    assert np.flatnonzero(grammar.mask()).tolist() == [END]


def test_a_model_may_have_fewer_rows_than_the_tokenizer_tokens():
    grammar = Grammars(TOKENIZER, VOCAB - 5, (END,)).new(SCHEMA)()
    for token in ids('{"a":'):
        assert grammar.mask().shape == (VOCAB - 5,) and grammar.mask()[token]
        grammar.advance(token)


def test_choices_have_places_of_their_own(grammars):
    new = grammars.new({"type": "object"})
    one, other = new(), new()
    one.advance(ids("{")[0])
    assert other.mask()[ids("{")[0]] and not one.mask()[ids("[")[0]]


def test_a_token_out_of_the_grammar_is_an_error_of_the_request(grammars):
    with pytest.raises(UserError, match="response_format"):
        grammars.new(SCHEMA)().advance(ids("x")[0])


def test_formats():
    assert json_schema(None) is json_schema({"type": "text"}) is None
    assert json_schema({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}) == SCHEMA
    for wrong in (
        {"type": "regex"},
        {},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": 1}},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "text", "pattern": "a"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "regex": "a"}},
        {"type": "json_schema", "json_schema": {"name": 1, "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": "yes"}},
    ):
        with pytest.raises(ApiError):
            json_schema(wrong)


def test_over_the_api(monkeypatch):
    answer = '{"a": "the"}'
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}

    def script(request):
        for token in ids(answer):
            assert request.grammar.mask()[token]
            request.grammar.advance(token)
        return blocks(ids(answer), (3,))

    def ask(**more):
        body = {"prompt": "a", "n": 2, "response_format": wanted} | more
        return HTTP.post(address + "/v1/completions", json=body)

    with fake_server(script) as (address, _):
        assert [json.loads(choice["text"])["a"] for choice in ask().json()["choices"]] == ["the", "the"]
        bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "colour"}}}
        endless = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#"}}}
        long = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a" * 66_000]}}}
        for refused in (
            {"response_format": bad},
            {"response_format": long},
            {"response_format": endless},
            {"ignore_eos": True},
            {"min_tokens": 2},
        ):
            assert ask(**refused).status_code == 400
        monkeypatch.setitem(sys.modules, "llguidance", None)
        missing = ask()
        assert missing.status_code == 400 and "eagle3-jax[structured]" in missing.json()["error"]["message"]
