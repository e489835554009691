"""Trackers: metrics of a run to services, besides the console and metrics.jsonl. One file each.

A tracker is a class with `__init__(config, step)` (the step it goes on from, 0 at first), `log(step, values)` and
`close()`; values are flat names to numbers. To add one: a file here, its name in TRACKERS and in `TrackingConfig`.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from eagle3_jax.config import Config
from eagle3_jax.errors import UserError
from eagle3_jax.sharding import is_main

TRACKERS = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases", "trackio": "Trackio"}


class Trackers:
    """All trackers of a run."""

    def __init__(self, trackers: list[Any]):
        self._trackers = trackers

    def log(self, step: int, metrics: dict[str, Any], heldout: dict[str, Any] | None) -> None:
        """A step's metrics, and the held-out ones if it was evaluated."""
        if self._trackers:
            values = flat("train", metrics) | flat("heldout", heldout or {})
            for tracker in self._trackers:
                tracker.log(step, values)


def require_trackers(config: Config) -> None:
    """Raises UserError for a tracker of the config whose package is not installed."""
    for name in config.tracking.to if is_main() else ():
        _tracker(name)


def _tracker(name: str) -> type:
    try:
        return getattr(importlib.import_module(f"eagle3_jax.training.trackers.{name}"), TRACKERS[name])
    except ImportError as error:
        raise UserError(f"tracking.to: {name} is not installed ({error}) / pip install 'eagle3-jax[track]'") from error


@contextlib.contextmanager
def open_trackers(config: Config, step: int) -> Iterator[Trackers]:
    """The trackers of a config; a run that goes on at `step` > 0 is continued there. Closed at the end, come what may.

    Raises UserError for a tracker whose package is not installed, and for one that does not open (no login, say).
    """
    with contextlib.ExitStack() as stack:
        opened = []
        for name in config.tracking.to if is_main() else ():
            make = _tracker(name)
            try:
                opened.append(make(config, step))
            except Exception as error:  # services raise what they like, each its own types
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise UserError(
                    f"tracking.to: {name} does not open / {reason} / mend that, or leave it out, and --resume"
                ) from error
            stack.callback(opened[-1].close)
        yield Trackers(opened)


def flat(prefix: str, values: dict[str, Any]) -> dict[str, float]:
    """Nested metrics as `prefix/name`, lists by their place from 1: `train/full_acceptance/1`."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(f"{prefix}/{name}", value)
        elif isinstance(value, list):
            found |= {f"{prefix}/{name}/{i}": float(v) for i, v in enumerate(value, start=1)}
        elif name != "step":
            found[f"{prefix}/{name}"] = float(value)
    return found
