"""The result of `eagle3 bench` as one figure: speed of every strategy at every batch size, and acceptance by depth."""

from pathlib import Path
from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.files import whole_file


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Writes the figure of rows as in api.md, whole or not at all; the suffix is the format. Raises UserError if it
    cannot be written."""
    from matplotlib.figure import Figure

    strategies = list(dict.fromkeys(r["strategy"] for r in rows))
    sizes = list(dict.fromkeys(r["batch"] for r in rows))
    colours = {name: f"C{i}" for i, name in enumerate(s for s in strategies if s != "plain")} | {"plain": "0.6"}
    figure = Figure(figsize=(5 + 0.45 * len(rows), 4.8), layout="constrained")
    speed, acceptance = figure.subplots(1, 2, width_ratios=(max(len(rows), 4), 5))
    _speeds(speed, rows, strategies, sizes, colours)
    _acceptance(acceptance, [r for r in rows if r["batch"] == sizes[0]], colours, sizes[0])
    figure.suptitle(title, fontsize="medium")
    try:
        with whole_file(path) as temporary:
            figure.savefig(temporary, dpi=150, format=path.suffix[1:])
    except OSError as error:
        raise UserError(f"cannot write the plot / {path} / {error.strerror or error}") from error


def _speeds(axes, rows, strategies: list[str], sizes: list[int], colours: dict[str, str]) -> None:
    """Groups of bars, one group a batch size; each bar is labelled with its speed-up over plain decoding."""
    width = 0.85 / len(strategies)
    for i, name in enumerate(strategies):
        here = [r for r in rows if r["strategy"] == name]
        places = [sizes.index(r["batch"]) + (i - (len(strategies) - 1) / 2) * width for r in here]
        bars = axes.bar(places, [r["tok_s"] for r in here], width, color=colours[name], label=name)
        labels = [f"{r['speedup_vs_plain']:.2f}x" for r in here]
        axes.bar_label(bars, labels, rotation=90, padding=3, fontsize="small")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("batch size (requests at once)")
    axes.set_ylabel("tokens a second, all requests together")
    axes.set_title("speed; above each bar: against plain")
    axes.margins(y=0.18)
    axes.legend(title="strategy", fontsize="small")


def _acceptance(axes, rows, colours: dict[str, str], size: int) -> None:
    """Share of rounds that accepted at least so many draft tokens."""
    for r in rows:
        rates = r["acceptance_by_depth"]
        if rates:
            label = f"{r['strategy']}, tau {r['tau']:.2f}"
            axes.plot(range(1, len(rates) + 1), rates, "o-", color=colours[r["strategy"]], label=label)
    deepest = max((len(r["acceptance_by_depth"]) for r in rows), default=0)
    axes.set_xticks(range(1, max(deepest, 1) + 1))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("draft tokens accepted, at least")
    axes.set_ylabel("share of rounds")
    axes.set_title(f"acceptance, batch {size}")
    axes.grid(alpha=0.3)
    if deepest:
        axes.legend(fontsize="small")
