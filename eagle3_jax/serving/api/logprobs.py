"""Log probabilities in OpenAI's two forms: of chat, and of the older completions."""

from collections.abc import Sequence
from typing import Any

from eagle3_jax.data.detokeniser import Vocabulary
from eagle3_jax.serving.api.answer import AnswerToken

_LEAST = -9999.0  # what OpenAI gives for a token that cannot come; JSON has no infinity


def chat_logprobs(vocabulary: Vocabulary, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """{"content": an entry for each token, with the bytes of its text}."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = vocabulary.bytes_of(token)
        return {"token": token_text(raw), "logprob": max(logprob, _LEAST), "bytes": list(raw)}

    return {
        "content": [
            entry(token.id, token.logprobs.logprob) | {"top_logprobs": [entry(*top) for top in token.logprobs.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(vocabulary: Vocabulary, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """Four parallel lists. top_logprobs holds the chosen token as well."""

    def text(token: int) -> str:
        return token_text(vocabulary.bytes_of(token))

    def likeliest(token: AnswerToken) -> dict[str, float]:
        top = {text(other): max(logprob, _LEAST) for other, logprob in reversed(token.logprobs.top)}
        return dict(reversed(top.items())) | {text(token.id): max(token.logprobs.logprob, _LEAST)}

    return {
        "tokens": [text(token.id) for token in tokens],
        "token_logprobs": [max(token.logprobs.logprob, _LEAST) for token in tokens],
        "top_logprobs": [likeliest(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def token_text(raw: bytes) -> str:
    """The text of a token; part of a character as OpenAI writes it: bytes:\\xe2\\x82."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
