"""The page itself: summary, charts, tables, samples, provenance. Works for a run that is still going on."""

import html
import json
import math
from pathlib import Path
from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.training.report.charts import Series, line_chart
from eagle3_jax.training.report.style import STYLE
from eagle3_jax.training.run_folder import write_text

NEEDED = {"step", "epoch", "loss", "loss_by_step", "seconds", "tokens_per_second"}  # of a step's metrics


def write_report(folder: Path) -> Path:
    """Writes FOLDER/report.html from the files beside it and returns its path. UserError if there is no run."""
    if not (folder / "metrics.jsonl").exists():
        raise UserError(f"no metrics.jsonl / {folder} / give the folder of a run, such as runs/NAME")
    steps = _rows(folder / "metrics.jsonl")
    if not steps:
        raise UserError(f"no step in metrics.jsonl yet / {folder} / let the run make one")
    provenance, result = (_read(folder / f"{name}.json", dict) for name in ("provenance", "result"))
    config = folder / "config.yaml"
    samples = _read(folder / "samples.json", list)
    body = [
        _summary(folder.name, steps, provenance, result),
        _wiring(provenance, steps),
        _charts(steps),
        _tables(steps, result),
        _data(provenance),
        _samples(samples),
        _provenance(provenance, config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""),
    ]
    title = html.escape(f"{folder.name}: EAGLE-3 training")
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )
    write_text(folder / "report.html", page)
    return folder / "report.html"


def _read(path: Path, kind: type) -> Any:
    """Its JSON, a value of that kind; an empty one if there is no such file."""
    if not path.exists():
        return kind()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} / {error} / restore it, or remove it") from error
    if not isinstance(content, kind):
        raise UserError(f"{path} is damaged: it holds no {kind.__name__} / restore it, or remove it")
    return content


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} / {error} / restore it") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            break  # the line a killed run was writing
        if not isinstance(row, dict) or not row.keys() >= NEEDED:
            raise UserError(f"{path}:{number}: not the metrics of a step / restore it, or remove the line")
        rows.append(row)
    return rows


def _heldout(steps: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [(row["step"], row["heldout"]) for row in steps if "heldout" in row]


def _summary(name: str, steps: list[dict[str, Any]], provenance: dict[str, Any], result: dict[str, Any]) -> str:
    """The few numbers that matter, and what they mean."""
    heldout, last = _heldout(steps), steps[-1]
    best = max(heldout, key=lambda pair: pair[1]["simulated_tau"], default=None)
    seconds = sum(row["seconds"] for row in steps)
    tiles = []
    if best is not None:
        at = f"step {best[0]:,}, held-out answers"
        tiles.append(("simulated tau", f"{best[1]['simulated_tau']:.3f}", f"tokens a round; {at}"))
        tiles.append(("first draft token right", f"{best[1]['full_acceptance'][0]:.1%}", "held-out, of all choices"))
    if generation := result.get("generation"):
        note = f"{generation['strategy']}, {generation['prompts']} prompts; simulated {generation['simulated_tau']:.3f}"
        tiles.append(("measured tau", f"{generation['tau']:.3f}", note))
    tiles.append(("steps", f"{last['step']:,}", f"{last['epoch']:.2f} passes over the data"))
    tokens = sum(row["tokens_per_second"] * row["seconds"] for row in steps)
    tiles.append(("tokens trained", f"{tokens:,.0f}", f"{tokens / max(seconds, 1e-9):,.0f} a second"))
    note = "evaluation not counted"
    if all("wait" in row for row in steps):
        note = f"{sum(row['wait'] for row in steps) / max(seconds, 1e-9):.2%} of it waiting for data; {note}"
    tiles.append(("time of steps", _duration(seconds), note))
    cells = "".join(
        f'<div class="tile"><span>{label}</span><b>{value}</b><small>{html.escape(note)}</small></div>'
        for label, value, note in tiles
    )
    target = html.escape(str(provenance.get("target", {}).get("path", "")))
    state = "finished" if result else f"unfinished, at step {last['step']:,}"
    return (
        f"<header><h1>{html.escape(name)}</h1><p>EAGLE-3 draft for <code>{target}</code> &middot; {state}</p></header>"
        f'<section class="tiles">{cells}</section>'
        "<p class='note'><b>tau</b> is how many tokens a verification of the target commits: 1 + the draft tokens "
        "accepted. <i>Simulated</i>: walked over held-out answers from the training graph, as serving would; "
        "<i>measured</i>: from real generation.</p>"
    )


def _wiring(provenance: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    """What the draft reads, in words: training and serving must agree on it."""
    wiring = provenance.get("wiring")
    if not wiring:
        return ""
    norms, count = wiring["norms"], len(steps[0]["loss_by_step"])
    fed_back = "after its norm (norm_output)" if "norm_output" in norms else "before its norm"
    rows = [
        ["states of the target that it reads, joined in this order", wiring["words"]],
        ["the same as numbers (0 = embedding, k = input of block k)", str(wiring["taps"])],
        ["norm flags that are on", ", ".join(norms) or "none"],
        ["from one draft step to the next goes its output", fed_back],
        ["draft steps trained", str(count)],
        ["draft vocabulary", f"{wiring['draft_vocabulary']:,} of {wiring['target_vocabulary']:,} tokens"],
    ]
    return f"<h2>Wiring</h2>{_table('What the draft reads and says', ['', ''], rows)}"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _charts(steps: list[dict[str, Any]]) -> str:
    x, heldout = [row["step"] for row in steps], _heldout(steps)
    at = [step for step, _ in heldout]

    def trained(key: str, name: str = "training", colour: str = "c0") -> Series:
        return Series(name, x, [row.get(key, math.nan) for row in steps], colour)

    loss = [trained("loss")]
    depths = len(heldout[0][1]["full_acceptance"]) if heldout else 0
    acceptance = [
        Series(f"draft token {d + 1}", at, [h["full_acceptance"][d] for _, h in heldout], f"d{min(d, 7)}", dots=True)
        for d in range(depths)
    ]
    tau = [trained("simulated_tau", f"training, {len(steps[0]['loss_by_step'])} draft tokens")]
    if heldout:
        tau.append(
            Series(f"held-out, {depths} draft tokens", at, [h["simulated_tau"] for _, h in heldout], "c1", dots=True)
        )
    by_step = [
        Series(f"draft step {d + 1}", x, [row["loss_by_step"][d] for row in steps], f"d{min(d, 7)}")
        for d in range(len(steps[0]["loss_by_step"]))
    ]
    charts = [
        line_chart("Loss", loss, "step"),
        line_chart("Simulated tau", tau, "step"),
        line_chart("Held-out acceptance by draft token", acceptance, "step", y_from_zero=True),
        line_chart("Loss of each draft step", by_step, "step"),
        line_chart("Learning rate", [trained("learning_rate", "rate")], "step", y_from_zero=True),
        line_chart("Tokens a second", [trained("tokens_per_second", "tokens/s")], "step", y_from_zero=True),
    ]
    return f"<h2>Over the run</h2><section class='charts'>{''.join(charts)}</section>"


def _tables(steps: list[dict[str, Any]], result: dict[str, Any]) -> str:
    """Where the draft is good and where not."""
    heldout = result.get("heldout") or (_heldout(steps)[-1][1] if _heldout(steps) else None)
    if heldout is None:
        return ""
    conditional, full = heldout["conditional_acceptance"], heldout["full_acceptance"]
    depth = [[str(d + 1), f"{f:.1%}", f"{c:.1%}"] for d, (f, c) in enumerate(zip(full, conditional, strict=True))]
    tables = [
        _table("Acceptance of each draft token", ["draft token", "accepted", "right if all before it were"], depth)
    ]
    for title, key, head in (
        ("By source", "by_source", "source"),
        ("By tokens before", "by_position", "tokens before"),
    ):
        rows = [[k, f"{v['simulated_tau']:.3f}", f"{v['rounds']:,}"] for k, v in heldout.get(key, {}).items()]
        if rows:
            tables.append(_table(f"{title} (held-out)", [head, "simulated tau", "rounds"], rows))
    return f"<h2>Where it is right</h2><section class='tables'>{''.join(tables)}</section>"


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='table'><h3>{html.escape(title)}</h3><table><tr>{cells}</tr>{lines}</table></div>"


def _data(provenance: dict[str, Any]) -> str:
    """What was trained on, and what was left out of it."""
    packing, statistics = provenance.get("packing"), provenance.get("statistics")
    if not packing or not statistics:
        return ""
    counts = {
        "documents": packing["documents"],
        "rows they are packed into": packing["rows"],
        "filled": f"{packing['fill_rate']:.1%}",
        "supervised tokens": packing["supervised_tokens"],
        "supervised tokens cut off": packing["lost_supervised_tokens"],
        "documents cut": packing["cut_documents"],
        "left out: too long": packing["overlong_documents"],
        "left out: nothing supervised": packing["dropped_documents"] - packing["overlong_documents"],
        "duplicates": provenance["duplicate_documents"],
        "rows refused": provenance["refused_rows"],
        "draft vocabulary covers (held-out)": f"{statistics['coverage']:.1%}",
    }
    rows = [[name, value if isinstance(value, str) else f"{value:,}"] for name, value in counts.items()]
    lengths = [[name, *(f"{value:,}" for value in values)] for name, values in statistics["lengths"].items()]
    sources = [[name, f"{count:,}"] for name, count in statistics["sources"].items()]
    tables = [
        _table("Training data", ["", "count"], rows),
        _table("Tokens of a document", ["", "least", "median", "90 %", "most"], lengths),
        _table("Sources", ["source", "documents"], sources),
    ]
    return f"<h2>Data</h2><section class='tables'>{''.join(tables)}</section>"


def _samples(samples: list[dict[str, Any]]) -> str:
    if not samples:
        return ""
    blocks = []
    for sample in samples:
        text = "".join(f'<span class="{kind}">{html.escape(token)}</span>' for token, kind in sample["tokens"])
        blocks.append(f"<article><small>simulated tau {sample['simulated_tau']:.2f}</small><p>{text}</p></article>")
    return (
        "<h2>Held-out answers</h2><p class='note'>"
        "<span class='drafted'>The draft proposed and the target accepted</span>, <span class='target'>the target gave "
        "itself</span> (one token a round), <span class='given'>the prompt</span>. Exported weights.</p>"
        f"<section class='samples'>{''.join(blocks)}</section>"
    )


def _provenance(provenance: dict[str, Any], config: str) -> str:
    rows = [
        ["command", " ".join(provenance.get("command", []))],
        ["commit", str(provenance.get("commit"))],
        ["first draft", str(provenance.get("init_from") or "new")],
        ["versions", ", ".join(f"{k} {v}" for k, v in provenance.get("versions", {}).items())],
        ["machine", ", ".join(map(str, provenance.get("machine", {}).values()))],
        ["hash of the target's weights", str(provenance.get("target", {}).get("fingerprint", {}).get("hash"))],
        *([f"hash of {name}", digest] for name, digest in provenance.get("data", {}).items()),
    ]
    return (
        f"<h2>Provenance</h2>{_table('This run', ['', ''], rows)}"
        f"<details><summary>config.yaml</summary><pre>{html.escape(config)}</pre></details>"
    )
