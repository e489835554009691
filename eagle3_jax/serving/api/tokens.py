"""POST /tokenize and /detokenize, as in vLLM; GET /v1/models and /health."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from eagle3_jax.data.template import text_ids
from eagle3_jax.serving.api.chat import chat_prompt
from eagle3_jax.serving.api.errors import ApiError
from eagle3_jax.serving.api.fields import DetokenizeBody, TokenizeBody, parse
from eagle3_jax.serving.api.service import Service
from eagle3_jax.serving.api.tools import check_tools


async def tokenize(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    return JSONResponse(await service.in_thread(_tokenized, service, await http.body()))


def _tokenized(service: Service, raw: bytes) -> dict[str, Any]:
    body = parse(TokenizeBody, raw)
    service.check_model(body.model)
    if body.messages is not None:
        tokens = chat_prompt(service, body, check_tools(body.tools or [], None))
    else:
        service.check_length(len(body.prompt), "prompt")
        special = body.add_special_tokens is not False
        tokens = text_ids(service.tokenizer, body.prompt) if special else _bare_ids(service, body.prompt)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.max_len}


def _bare_ids(service: Service, text: str) -> list[int]:
    return service.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


async def detokenize(http: HttpRequest) -> Response:
    """Special tokens come out by their names."""
    service: Service = http.app.state.service
    return JSONResponse(await service.in_thread(_detokenized, service, await http.body()))


def _detokenized(service: Service, raw: bytes) -> dict[str, str]:
    body = parse(DetokenizeBody, raw)
    service.check_model(body.model)
    if len(body.tokens) > service.max_len:
        message = f"tokens: {len(body.tokens)} are more than this model's context, which is {service.max_len}"
        raise ApiError(400, message, "tokens")
    if outside := [token for token in body.tokens if not 0 <= token < service.vocab_size]:
        raise ApiError(400, f"tokens: {outside[0]} is outside 0..{service.vocab_size - 1}", "tokens")
    text = b"".join(map(service.vocabulary.bytes_of, body.tokens))
    return {"prompt": text.decode(errors="replace")}


async def models(http: HttpRequest) -> Response:
    return JSONResponse({"object": "list", "data": [_card(http.app.state.service)]})


async def model(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    service.check_model(http.path_params["name"])
    return JSONResponse(_card(service))


def _card(service: Service) -> dict:
    """eagle3.strategies: what requests may name besides auto; the page offers them."""
    facts = {"created": service.created, "owned_by": "eagle3-jax", "max_model_len": service.max_len}
    facts["eagle3"] = {"strategies": list(service.engine.strategies)}
    return {"id": service.model, "object": "model", **facts}


async def health(http: HttpRequest) -> Response:
    """200 when requests are taken; 503 while the server starts or stops, and when its engine has died."""
    engine = http.app.state.service.engine
    ready = engine.state == "ready"
    return JSONResponse({"status": engine.state, "error": engine.error}, 200 if ready else 503)


async def metrics(http: HttpRequest) -> Response:
    content, kind = http.app.state.service.metrics.render()
    return Response(content, headers={"Content-Type": kind})
