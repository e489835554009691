"""`eagle3 bench`: plain against speculative decoding on a file of prompts."""

import re
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle3_jax.cli.common import (
    DTypeOption,
    JsonOption,
    MeshOption,
    NamedTargetOption,
    QuantizeOption,
    check_folder,
    note,
    open_pair,
    warn_of_pair,
    write_json,
)
from eagle3_jax.errors import UserError

_STRATEGIES = "Comma-separated: plain, auto, chain:K, tree:DxKxN, oracle:K (chain:K whose drafts are all right)."


def _check_plot(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path} / name a .png, .svg or .pdf file")
    return check_folder("--plot", path)


def bench_command(
    draft: Annotated[str, typer.Option(help="Draft folder or hub name.")],
    prompts: Annotated[Path, typer.Option(help="JSONL file of rows with `turns`; the first turn of each is used.")],
    target: NamedTargetOption = None,
    strategies: Annotated[str, typer.Option(help=_STRATEGIES)] = "plain,chain:3",
    batch: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy; else all strategies sample by the same seed.")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    dtype: DTypeOption = "bfloat16",
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    json_file: JsonOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw the result: .png, .svg or .pdf.", show_default="beside --json", callback=_check_plot
        ),
    ] = None,
) -> None:
    """Measures tok/s, tau and acceptance of each strategy on the same prompts, taking turns."""
    names = list(dict.fromkeys(name.strip() for name in strategies.split(",")))  # each once
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", size.strip()) for size in batch.split(",")):
        raise UserError(f"--batch {batch} / give sizes like 1,4,8")
    sizes = list(dict.fromkeys(int(size) for size in batch.split(",")))
    from eagle3_jax.data.records import read_prompts

    turns = read_prompts(prompts)[:limit]
    if max(sizes) > len(turns):
        raise UserError(f"--batch {max(sizes)} needs as many prompts, {prompts} gives {len(turns)} / lower it")
    loaded, bound = open_pair(target, draft, dtype, mesh, quantize)
    from eagle3_jax.bench.measure import as_strategy, measure, row
    from eagle3_jax.bench.parts import measure_parts
    from eagle3_jax.bench.plot import draw
    from eagle3_jax.data.template import prompt_ids
    from eagle3_jax.machine import describe_machine
    from eagle3_jax.speculate.generate import nonfinite_warning, strategies_of
    from eagle3_jax.speculate.request import SamplingParams, check_params, check_prompt
    from eagle3_jax.speculate.strategy import parse_strategy

    for name in names:
        if name != "auto":
            parse_strategy(as_strategy(name))
    sampling = SamplingParams(max_new_tokens, temperature, seed=0)
    check_params(sampling, loaded.config.vocab_size)
    tokenizer, template = loaded.require_tokenizer(), {} if bound is None else bound.chat_template
    ids = [prompt_ids(tokenizer, [{"role": "user", "content": turn[0]}], template=template) for turn in turns]
    for number, prompt in enumerate(ids, start=1):  # as in the file; now, and not when it is its turn
        check_prompt(number, prompt, loaded)
    warn_of_pair(loaded, bound)
    for name in names:
        strategies_of(as_strategy(name), bound)
    wanted = names if "plain" in names else ["plain", *names]
    rows = []
    for size in sizes:
        if left := len(ids) % size:
            note(f"batch {size}: the last {left} of {len(ids)} prompts are left out, they fill no batch")
        progress = lambda i, n: note(f"group {i} of {n}")  # noqa: E731
        tallies = measure(loaded, bound, ids, wanted, max_new_tokens, size, progress, temperature)
        ran = {shape for name in names for shape in tallies[name].shares()}
        drafted = any(shape.depth for shape in ran)
        parts = measure_parts(loaded, bound, ids[:size], list(ran), sampling) if drafted else None
        rows += [row(name, size, tallies[name], tallies["plain"], parts) for name in names]
        for name in names:
            if warning := nonfinite_warning(tallies[name].results):
                note(f"{name}, batch {size}: {warning.removeprefix('note: ')}")
        if "auto" in names:
            shares = ", ".join(f"{share:.0%} {used.text}" for used, share in tallies["auto"].shares().items())
            note(f"auto, batch {size}: rounds were {shares}")
    for r in rows:
        pays_from = r["tau"] / r["speedup_vs_plain"]
        print(
            f"{r['strategy']:>11}  batch {r['batch']:>2}  {r['tok_s']:8.1f} tok/s  {r['ms_per_token']:7.2f} ms/token  "
            f"tau {r['tau']:.3f} (pays from {pays_from:.2f})  {r['speedup_vs_plain']:.2f}x  "
            f"same tokens {r['identical_to_plain']:.0%}  {r['acceptance_by_depth']}  host {r['host_share']:.1%}"
        )
        if "bound" in r:
            print(f"{'':>11}  {_bound_words(r)}")
    versions = {name: metadata.version(name) for name in ("eagle3-jax", "jax", "flax")}
    machine = describe_machine()
    write_json(json_file, {"rows": rows, "machine": machine, "versions": versions})
    if plot is None and json_file is not None:
        plot = json_file.with_suffix(".png")
    if plot is not None:
        draw(rows, plot, f"{target or loaded.path} with {draft}, {dtype}, {machine['processor']}, {machine['device']}")


def _bound_words(row: dict[str, Any]) -> str:
    """What the parts of a round allow, for a line under its row."""
    parts = f"v {row['v']:.2f}, d {row['d']:.3f} (floor {row['d_floor']:.3f}): " if "v" in row else ""
    reached = f"without prefill {row['decode_speedup']:.2f}x reached, {row['of_bound']:.0%}"
    return f"{parts}tau / (v + K d) allows {row['bound']:.2f}x, {reached}"
