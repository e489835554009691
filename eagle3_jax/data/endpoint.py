"""Training answers from an OpenAI-compatible server (vLLM, SGLang, ours) that serves the target.

Rows are conversations: a server returns text, and training tokenises it as serving would. An answer that was cut at the
limit has no end-of-turn token, so it becomes a row of token ids without one. The file is that of `answers`: appended to
as conversations end, and continued by a second run.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3_jax.data.answers import AnswerCounts, AnswerSettings, append_row, continued, prompts_hash
from eagle3_jax.data.records import THOUGHTS, read_prompts
from eagle3_jax.data.template import ChatOptions, check_variables, prompt_ids
from eagle3_jax.errors import UserError

_TRIES, _PAUSE = 4, 1.0  # of a request; seconds before the second try, doubled each time
_TIMEOUT = 600.0  # seconds for an answer


def answers_from_endpoint(
    url: str,
    model: str | None,
    tokenizer: Any,
    prompts: Path,
    out: Path,
    settings: AnswerSettings,
    progress: Callable[[AnswerCounts], None],
    limit: int | None = None,
) -> AnswerCounts:
    """Answers the turns of every prompt, `settings.slots` conversations at a time, `settings.samples` of each prompt.

    url: up to and with `/v1`; the key is OPENAI_API_KEY, if set. model: None = the first that the server names.
    tokenizer: of the target; for the length of prompts and for cut answers. Raises UserError if the server cannot be
    reached or refuses, if `out` was begun with other settings, or cannot be written; what has been answered is kept.
    """
    check_variables(tokenizer, ChatOptions(template=settings.template))
    asked = read_prompts(prompts)
    file, url = prompts_hash(prompts, asked), url.rstrip("/")
    return asyncio.run(_answer_all(url, model, tokenizer, file, asked[:limit], out, settings, progress))


async def _answer_all(url, model, tokenizer, file: str, conversations, out, settings, progress) -> AnswerCounts:
    httpx = _httpx()
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(headers=headers, timeout=_TIMEOUT) as client:
        if model is None:
            named = await _request(client, "GET", f"{url}/models")
            with _of_openai(f"{url}/models"):
                models = named["data"]
                model = models[0]["id"] if models else None
            if model is None:
                raise UserError(f"the server names no model / {url} / give --model")
        facts = {
            "endpoint_model": model,
            "prompts": file,
            "settings": settings.facts(),
        }
        with continued(out, facts) as done:
            counts = AnswerCounts(prompts=len(conversations) * settings.samples)
            work = [i for i in range(counts.prompts) if i not in done]
            counts.already_there = counts.prompts - len(work)
            progress(counts)
            queue = iter(work)

            async def worker() -> None:
                for i in queue:
                    turns = conversations[i // settings.samples]
                    row = await _converse(client, url, model, tokenizer, turns, i, settings, counts)
                    if row is None:
                        counts.too_long += 1
                    else:
                        append_row(out, {"id": i, **row})
                        counts.written += 1
                    progress(counts)

            workers = [asyncio.create_task(worker()) for _ in range(min(settings.slots, max(len(work), 1)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
    return counts


async def _converse(client, url, model, tokenizer, turns, index, settings, counts) -> dict[str, Any] | None:
    """One conversation as a row; None if its first prompt is too long. Ends at a cut answer or a prompt too long."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        asked = [*messages, {"role": "user", "content": turn}]
        ids = list(map(int, prompt_ids(tokenizer, asked, "prompt", template=settings.template)))
        if len(ids) > settings.max_prompt:
            break
        body = {
            "model": model,
            "messages": asked,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed + index,
            **({"chat_template_kwargs": dict(settings.template)} if settings.template else {}),
        }
        answer = await _request(client, "POST", f"{url}/chat/completions", body)
        with _of_openai(f"{url}/chat/completions"):
            choice = answer["choices"][0]
            reason, said = choice["finish_reason"], choice["message"]
            message = {key: said[key] for key in ("content", *THOUGHTS) if said.get(key)}
            counts.tokens += (answer.get("usage") or {}).get("completion_tokens") or 0
        if not all(isinstance(text, str) for text in message.values()):
            raise UserError(f"the server's answer is no text / {url} / does it serve the target?")
        text = message.get("content", "")
        if reason == "length":
            new = tokenizer(text, add_special_tokens=False)["input_ids"]
            if messages or not new or message.keys() & THOUGHTS:
                break  # the turns before it are whole, and thoughts are rendered by the template alone
            return {"input_ids": ids + new, "loss_mask": [0] * len(ids) + [1] * len(new)}
        if reason != "stop":
            raise UserError(
                f"the server broke an answer off ({reason}) / {url} / what is written stays; run again to go on"
            )
        messages = [*asked, {"role": "assistant", "content": text, **message}]
    return {"conversations": messages} if messages else None


@contextlib.contextmanager
def _of_openai(url: str) -> Iterator[None]:
    """UserError where the server's JSON lacks what OpenAI's has."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"the server's answer is not in OpenAI's form ({error!r}) / {url} / is it the URL?") from error


async def _request(client, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's JSON. Tries again where waiting may help; otherwise UserError."""
    httpx, reason = _httpx(), ""
    for attempt in range(_TRIES):
        if attempt:
            await asyncio.sleep(_PAUSE * 2 ** (attempt - 1))
        try:
            response = await client.request(method, url, json=body)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            continue
        if response.status_code == 200:
            try:
                return response.json()
            except ValueError as error:
                raise UserError(f"the server's answer is no JSON / {url} / is the URL that of /v1?") from error
        reason = f"{response.status_code} {' '.join(response.text.split())[:200]}"
        if response.status_code != 429 and response.status_code < 500:
            break
    raise UserError(f"the server does not answer ({reason}) / {url} / what is written stays; run again to go on")


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise UserError("--endpoint needs httpx / pip install 'eagle3-jax[data]'") from error
    return httpx
