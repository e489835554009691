"""Requests of mixed shape for load tests: chats and completions, streamed or not, greedy and sampled, stop strings,
penalties, several choices; and some that no server should take."""

import json
import random
from dataclasses import dataclass
from importlib import resources
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Job:
    """One request, without a strategy. body: of OpenAI's API."""

    number: int
    path: str
    body: dict[str, Any]

    def asking(self, strategy: str) -> dict[str, Any]:
        return {**self.body, "eagle3": {"strategy": strategy}}


def prompts() -> list[str]:
    """The demo's held-out prompts."""
    text = resources.files("eagle3_jax.bench").joinpath("demo_prompts/heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["turns"][0] for line in text.splitlines()]


def jobs(count: int, longest_prompt: int, longest_answer: int, seed: int = 0) -> list[Job]:
    """`count` different requests. longest_prompt: in characters; longest_answer: in tokens."""
    rng, texts = random.Random(seed), prompts()
    return [_job(i, rng, texts, longest_prompt, longest_answer) for i in range(count)]


def _job(number: int, rng: random.Random, texts: list[str], longest_prompt: int, longest_answer: int) -> Job:
    text = " ".join(rng.sample(texts, 4))[: rng.randint(8, longest_prompt)]
    body: dict[str, Any] = {"max_tokens": rng.randint(1, longest_answer), "temperature": 0}
    if number % 3 == 1:
        body |= {"temperature": 0.8, "seed": number}
    if number % 5 == 2:
        body["stop"] = [rng.choice("aeiost"), "the"]
    if number % 7 == 3:
        body |= {"frequency_penalty": 0.5, "presence_penalty": 0.2}
    if number % 11 == 4:
        body |= {"n": 2, "seed": number}
    if number % 4:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if number % 6 == 5:
        return Job(number, COMPLETIONS, body | {"prompt": text})
    messages = [{"role": "user", "content": text}]
    if number % 2:
        messages.insert(0, {"role": "system", "content": "you help people"})  # a prefix that many share
    return Job(number, CHAT, body | {"messages": messages})


def malformed() -> list[tuple[str, bytes]]:
    """(path, body): each must be answered with a status of 400 to 499."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    changes: list[dict[str, Any]] = [
        {"max_tokens": -1},
        {"max_tokens": "many"},
        {"temperature": -0.5},
        {"temperature": "hot"},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "user", "content": "hello " * 20000}]},
        {"eagle3": {"strategy": "chain:0"}},
        {"eagle3": {"strategy": "best"}},
        {"no_such_field": 1},
        {"top_p": 7},
        {"stop": [3]},
    ]
    bodies = [(CHAT, json.dumps(chat | change).encode()) for change in changes]
    broken = [b"{", b"", b"[]", b"null", b"\xff\xfe", b'{"messages": NaN}']
    return [*bodies, *((CHAT, body) for body in broken), (COMPLETIONS, b"{}"), (COMPLETIONS, b'{"prompt": []}')]
