"""`eagle3 data ...`: making and looking at training data."""

import dataclasses
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_jax.cli.common import (
    DTypeOption,
    JsonOption,
    MeshOption,
    QuantizeOption,
    TargetOption,
    TemplateOption,
    note,
    open_target,
    template_variables,
    warn_of_pair,
    write_json,
)
from eagle3_jax.cli.data_features import store_features
from eagle3_jax.cli.data_inspect import inspect_data
from eagle3_jax.cli.data_preview import preview_data
from eagle3_jax.errors import UserError

if TYPE_CHECKING:
    from eagle3_jax.data.answers import AnswerCounts
    from eagle3_jax.models.target import Target

data_app = typer.Typer(help="Make training data and look at it.")
data_app.command("preview")(preview_data)
data_app.command("inspect")(inspect_data)
data_app.command("features")(store_features)
_LOG_EVERY = 60  # seconds between lines where no terminal can show a bar


@data_app.callback()
def _data() -> None:
    """Make training data and look at it."""


@data_app.command("generate")
def generate_data(
    target: TargetOption,
    out: Annotated[Path, typer.Option(help="JSONL file of rows input_ids, loss_mask; continued if it is there.")],
    prompts: Annotated[Path | None, typer.Option(help="JSONL file of rows with `turns`, the user's messages.")] = None,
    self_prompt: Annotated[
        int | None, typer.Option(min=1, help="Let the target write so many prompts, to OUT.prompts.jsonl.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    max_prompt: Annotated[int, typer.Option(min=1, help="Longer prompts (in tokens) are left out and counted.")] = 512,
    slots: Annotated[int, typer.Option(min=1, help="Answers decoded together.")] = 32,
    temperature: Annotated[float, typer.Option(min=0, help="0 = greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Answers of each prompt; needs a temperature.")] = 1,
    chat_template: TemplateOption = "{}",
    endpoint: Annotated[
        str | None, typer.Option(help="Ask an OpenAI-compatible server (http://HOST:PORT/v1), not our engine.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its name at the endpoint; the first one if left out.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    dtype: DTypeOption = "bfloat16",
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    json_file: JsonOption = None,
) -> None:
    """Let the target answer prompts: a draft must be trained on what its target says.

    Stopped at any time, the same command goes on where it was.
    """
    if (prompts is None) == (self_prompt is None):
        raise UserError("where do the prompts come from? / give either --prompts FILE or --self-prompt N")
    from eagle3_jax.data.records import read_prompts

    if prompts is not None:
        read_prompts(prompts)  # faults come before the model is loaded
    if endpoint is not None and prompts is None:
        raise UserError("--endpoint cannot write prompts / give --prompts FILE")
    if endpoint is not None and (mesh or quantize):
        raise UserError("--mesh and --quantize are of our own engine / leave them out with --endpoint")
    if endpoint is None and model is not None:
        raise UserError("--model names a model of an endpoint / give --endpoint URL, or leave it out")
    from eagle3_jax.data.answers import AnswerSettings, generate_answers

    variables = template_variables(chat_template)
    settings = AnswerSettings(max_prompt, max_new_tokens, slots, temperature, top_p, seed, samples, variables)
    loaded = open_target(target, dtype, quantize, mesh) if endpoint is None else None
    if loaded is not None:
        warn_of_pair(loaded, None)
    try:
        file = prompts or _self_prompts(loaded, self_prompt, out, seed, slots)
        with _bar("answers", "{tokens:,} tokens, {speed:.0f} tok/s") as update:
            start = time.perf_counter()

            def progress(counts: "AnswerCounts") -> None:
                done = counts.already_there + counts.written + counts.too_long
                speed = counts.tokens / max(time.perf_counter() - start, 1e-6)
                update(done, counts.prompts, tokens=counts.tokens, speed=speed)

            if loaded is not None:
                counts = generate_answers(loaded, file, out, settings, progress, limit)
            else:
                from eagle3_jax.data.endpoint import answers_from_endpoint
                from eagle3_jax.models.target import load_tokenizer

                tokenizer = load_tokenizer(target)
                counts = answers_from_endpoint(endpoint, model, tokenizer, file, out, settings, progress, limit)
            seconds = time.perf_counter() - start
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"interrupted / {out} / run the same command again to go on") from error
    note(
        f"{counts.written} answers written to {out} ({counts.tokens:,} tokens, {counts.tokens / seconds:.0f} tok/s), "
        f"{counts.already_there} were there, {counts.too_long} prompts too long, {counts.prompts} in all"
    )
    write_json(json_file, dataclasses.asdict(counts) | {"seconds": seconds, "tok_s": counts.tokens / seconds})


def _self_prompts(target: "Target", count: int, out: Path, seed: int, slots: int) -> Path:
    from eagle3_jax.data.self_prompts import write_self_prompts

    file = out.with_name(out.name + ".prompts.jsonl")
    with _bar("prompts", "{sampled:,} sampled") as update:
        write_self_prompts(target, count, file, seed, slots, lambda kept, n: update(kept, count, sampled=n))
    return file


@contextmanager
def _bar(what: str, details: str):
    """Yields update(done, total, **fields): a bar on a terminal, now and then a line elsewhere. All on stderr.

    details: format of what stands behind the bar, over the fields.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    # Time left from the last minutes: answers finish in bursts, slots being in step at first.
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        last = time.monotonic()

        def update(done: int, total: int, **fields) -> None:
            nonlocal last
            text = details.format(**fields)
            bar.update(task, completed=done, total=total, description=text)
            if not console.is_terminal and time.monotonic() - last > _LOG_EVERY:
                last = time.monotonic()
                note(f"{what}: {done} of {total}, {text}")

        yield update
