"""`eagle3 serve`: an OpenAI server over a target and, with a draft, speculation. Serving goes on until a signal."""

import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3_jax.cli.common import (
    DraftOption,
    DTypeOption,
    MeshOption,
    NamedTargetOption,
    QuantizeOption,
    note,
    open_pair,
    warn_of_pair,
)
from eagle3_jax.errors import UserError

if TYPE_CHECKING:
    from eagle3_jax.draft.draft import Draft
    from eagle3_jax.models.target import Target

_KEY = "EAGLE3_API_KEY"
_SUGGESTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def serve_command(
    target: NamedTargetOption = None,
    draft: DraftOption = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = any free one.")] = 8000,
    dtype: DTypeOption = "bfloat16",
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    model_name: Annotated[
        str | None, typer.Option(help="The name that clients give.", show_default="that of the target")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Most sequences at once.", show_default="8, or what fits into --memory")
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option(
            min=2, help="Most tokens of a prompt and its answer.", show_default="2048, or the target's context"
        ),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="For keys and values, as 512M or 2G; sets --slots.")] = None,
    strategy: Annotated[
        str, typer.Option(help="Of requests that name none: plain, auto, chain:K or tree:DxKxN.")
    ] = "auto",
    strategies: Annotated[
        str, typer.Option(help="Comma-separated: what else requests may name. Each is compiled at start.")
    ] = "",
    queue: Annotated[int, typer.Option(min=0, help="Most requests that wait; more are answered with 429.")] = 64,
    chunk: Annotated[int, typer.Option(min=1, help="Most prompt tokens read between two rounds of the others.")] = 64,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Most seconds for a request, waiting included.", show_default="no limit")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=_KEY, help="Clients must send it as a bearer token.", show_default="none")
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, max=1e6, help="Largest body of a request, in MiB.")] = 8,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A page's origin that may call the server; may be given more than once.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, max=86400, help="How long running answers may go on after SIGTERM or Ctrl-C.")
    ] = 30,
) -> None:
    """Serves an OpenAI API (chat and completions), a page at / and Prometheus metrics at /metrics."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise UserError(f"--api-key or {_KEY} is empty or not plain ASCII / give another one")
    budget = None if memory is None else parse_memory(memory)
    listed = tuple(name.strip() for name in strategies.split(",") if name.strip())
    _check_strategies((strategy, *listed), draft is not None)
    from eagle3_jax.serving.api.server import Server, listen

    with listen(host, port) as listener:  # before loading: a port that is in use is said at once
        loaded, bound = open_pair(target, draft, dtype, mesh, quantize)
        warn_of_pair(loaded, bound)
        from eagle3_jax.serving.api.app import create_app
        from eagle3_jax.serving.api.service import Service
        from eagle3_jax.serving.engine import Engine
        from eagle3_jax.serving.logs import log_json
        from eagle3_jax.serving.requests import Settings

        count, length = _sizes(loaded, bound, slots, max_len, budget, (strategy, *listed))
        engine = Engine(loaded, bound, Settings(count, length, strategy, listed, queue, chunk))
        model = {"vocab_size": loaded.config.vocab_size, "eos_token_ids": loaded.eos_token_ids, "max_len": length}
        limits = {"timeout": timeout, "most_requests": count + queue}
        template = {} if bound is None else bound.chat_template
        name = model_name or served_name(target, loaded)
        service = Service(engine, loaded.require_tokenizer(), name, **model, **limits, template=template)
        if api_key is None and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            note(f"warning: anyone who reaches {host} can use this server / give --api-key")
        for line in _facts(loaded, bound, engine):
            note(line)
        log_json()
        app = create_app(service, api_key, int(max_body_mb * 2**20), cors_origin or ())
        engine.start()
        address = f"[{host}]" if ":" in host else host
        note(f"listening on http://{address}:{listener.getsockname()[1]} (model {name}); ready when /health says so")
        raise typer.Exit(Server(app, engine, drain_seconds).run_on(listener))


def parse_memory(text: str) -> int:
    """Bytes of `512M`, `1.5G` or a plain number. Raises UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise UserError(f"--memory {text} / give bytes, or a number with K, M, G or T as 512M")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def served_name(target: str | None, loaded: "Target") -> str:
    """The name clients give: `demo`, a hub name, or that of the folder or file."""
    if target == "demo":
        return "demo"
    return loaded.hub_id or os.path.basename(os.path.normpath(loaded.path)).removesuffix(".gguf")


def _sizes(
    target: "Target",
    draft: "Draft | None",
    slots: int | None,
    max_len: int | None,
    memory: int | None,
    strategies: tuple[str, ...],
) -> tuple[int, int]:
    """Slots and the most tokens of each."""
    from eagle3_jax.serving.cache import slots_for
    from eagle3_jax.serving.strategies import slot_room
    from eagle3_jax.speculate.strategy import parse_strategy

    length = max_len or min(2048, target.config.max_positions)
    if memory is None:
        return slots or 8, length
    room = slot_room([parse_strategy(name) for name in strategies if name != "auto"])
    fitting = slots_for(memory, length + room, target, draft)
    if slots is not None and slots > fitting:
        raise UserError(f"--slots {slots} / --memory holds {fitting} slots of {length} tokens / lower one of them")
    return slots or fitting, length


def _check_strategies(names: tuple[str, ...], has_draft: bool) -> None:
    from eagle3_jax.speculate.strategy import parse_strategy

    for name in names:
        if name != "auto" and parse_strategy(name).depth and not has_draft:
            raise UserError(f"strategy {name} needs a draft / give --draft, or use plain")


def _facts(target: "Target", draft: "Draft | None", engine: Any) -> list[str]:
    """What is printed at start: wiring, memory, and the model's own suggestions that are not followed."""
    mesh, kept = target.placement.words, target.quantize
    lines = [
        f"target {target.path}"
        + (f", its blocks in {kept}" if kept else "")
        + (f", over the devices of {mesh}" if mesh else "")
    ]
    if draft is None:
        lines.append("no draft: plain decoding")
    else:
        lines.append(f"draft taps {draft.taps.words(target.num_layers)}; strategies {', '.join(engine.strategies)}")
    if draft is not None and draft.chat_template:
        variables = ", ".join(f"{name}={value}" for name, value in draft.chat_template.items())
        lines.append(f"chats are rendered with {variables}, as in the draft's training, unless requests say otherwise")
    size = engine.stats().kv_bytes / 2**20
    settings = engine.settings
    lines.append(f"{settings.slots} slots of {settings.max_len} tokens: {size:.0f} MiB of keys and values")
    if suggested := _suggestions(target.path):
        lines.append(
            f"note: generation_config.json suggests {suggested}; requests that name none get temperature 1, top_p 1"
        )
    return lines


def _suggestions(path: str) -> str:
    from eagle3_jax.models.weights import read_json

    file = Path(path) / "generation_config.json"
    content = read_json(file) if file.exists() else {}
    return ", ".join(f"{name} {content[name]}" for name in _SUGGESTED if content.get(name) is not None)
