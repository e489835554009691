"""Turn by turn, then the medians: what was measured of each trainer, as a dictionary and as a table."""

import statistics
from collections.abc import Callable
from typing import Any

from bench.peers.turns import Trainer


def take_turns(trainers: list[Trainer], turns: int, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Each trainer's {turns: [{tokens, seconds, steps, waited}, ...], peak_stepping}, by name.

    One after another, again and again, so that what else the machine does meets all alike. A trainer that breaks is
    left out of the rest and keeps the reason under `failed`.
    """
    results: dict[str, dict[str, Any]] = {trainer.name: {"turns": []} for trainer in trainers}
    for number in range(turns + 1):
        for trainer in trainers:
            result = results[trainer.name]
            if "failed" in result:
                continue
            try:
                if number == turns:
                    result |= trainer.end()
                    continue
                result["turns"].append(turn := trainer.turn())
                say(f"turn {number + 1}: {trainer.name} {turn['tokens'] / turn['seconds']:.1f} tok/s")
            except RuntimeError as error:
                result["failed"] = str(error)
                say(str(error))
    return results


def summary(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By name: median tok/s, its ratio (`ours` over it; the first one's if there are several), s a step, peaks, wait.

    Trainers without a turn are left out.
    """
    measured = {name: result for name, result in results.items() if result["turns"]}
    rates = {
        name: statistics.median(turn["tokens"] / turn["seconds"] for turn in result["turns"])
        for name, result in measured.items()
    }
    first = next(iter(rates.values()), None)
    table = {}
    for name, result in measured.items():
        turns = result["turns"]
        seconds, steps = sum(turn["seconds"] for turn in turns), sum(turn["steps"] for turn in turns)
        table[name] = {
            "tokens_per_second": rates[name],
            "ratio": first / rates[name],
            "seconds_a_step": seconds / steps,
            "tokens_a_step": sum(turn["tokens"] for turn in turns) / steps,
            "wait": sum(turn["waited"] for turn in turns) / seconds,
            "peak_loading": result.get("peak_loading"),
            "peak_stepping": result.get("peak_stepping"),
        }
    return table


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The summary as Markdown."""
    lines = [
        "| trainer | tok/s | first / this | s a step | tokens a step | peak MiB: start, steps | wait for data |",
        "|---|---|---|---|---|---|---|",
    ]

    def mib(size: int | None) -> str:
        return "-" if size is None else f"{size / 2**20:,.0f}"

    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['tokens_per_second']:.0f} | {row['ratio']:.2f}x | {row['seconds_a_step']:.2f} "
            f"| {row['tokens_a_step']:.0f} | {mib(row['peak_loading'])}, {mib(row['peak_stepping'])} "
            f"| {row['wait']:.2%} |"
        )
    return "\n".join(lines)
