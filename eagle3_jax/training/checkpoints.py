"""Training state on disk through orbax, with the wiring beside it.

Orbax restores into a template with another tap set or vocabulary map without complaint, so both, with the target's
fingerprint, are stored as JSON in each checkpoint and compared before anything is restored.
"""

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from eagle3_jax.data.packing import Packed
from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.taps import TapSet, require


def wiring_facts(draft: Draft, target_fingerprint: dict[str, Any], train: Packed, heldout: Packed) -> dict[str, Any]:
    """What must be equal for a checkpoint to go on with: taps, draft, vocabulary map, target, packed data."""
    return {
        "taps": list(draft.taps),
        "draft_config": stated(draft.config),
        "d2t": _digest(np.asarray(draft.d2t, np.int64)),
        "target": target_fingerprint["hash"],
        "train": _digest(train.input_ids, train.loss_mask, train.document_ids),
        "heldout": _digest(heldout.input_ids, heldout.loss_mask, heldout.document_ids),
    }


def stated(config: Any) -> Any:
    """A dataclass as JSON values, without what is at its default: options that are added later change nothing."""
    if dataclasses.is_dataclass(config):
        named = ((field, getattr(config, field.name)) for field in dataclasses.fields(config))
        return {field.name: stated(value) for field, value in named if value != field.default}
    if isinstance(config, (tuple, TapSet)):
        return [stated(value) for value in config]
    return config


def _digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def _os_error(message: str) -> str | None:
    """The operating system's words in an error of tensorstore; None for any other error."""
    found = re.search(r"([^:]+) \[os_error_code=", message)
    return None if found is None else found[1].strip()


def _tau(metrics: dict[str, float]) -> float:
    return metrics["simulated_tau"]


class Checkpoints:
    """The newest `keep` checkpoints of a run and the best by held-out tau. A save is complete or invisible."""

    def __init__(self, folder: Path, facts: dict[str, Any], keep: int = 1):
        self._facts = facts
        policy = ocp.checkpoint_managers.AnyPreservationPolicy(
            [
                ocp.checkpoint_managers.LatestN(keep),
                ocp.checkpoint_managers.BestN(get_metric_fn=_tau, n=1, keep_checkpoints_without_metrics=False),
            ]
        )
        # best_fn besides the policy: without it orbax stores no metrics and takes the newest for the best.
        options = ocp.CheckpointManagerOptions(
            best_fn=_tau, preservation_policy=policy, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        try:
            self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:  # of their metrics, which it reads at once
            words = " ".join(str(error).split())
            raise UserError(f"a checkpoint cannot be read / {folder} / {words} / remove the damaged one") from error
        self._folder = folder

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Any, extra: dict[str, Any], simulated_tau: float | None) -> None:
        """Writes state (a pytree of arrays) and extra (JSON) as `step`, unless that step is there already.

        simulated_tau: held out; None for a checkpoint to go on from that is no candidate for the best.
        """
        if self.latest == step:
            return
        items = {"state": ocp.args.StandardSave(state), "facts": ocp.args.JsonSave(self._facts | {"extra": extra})}
        try:
            metrics = None if simulated_tau is None else {"simulated_tau": simulated_tau}
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            # What was begun would fill the disk further. tensorstore reports its write errors as ValueError.
            shutil.rmtree(self._folder / f"{step}.orbax-checkpoint-tmp", ignore_errors=True)
            reason = error.strerror or str(error) if isinstance(error, OSError) else _os_error(str(error))
            if reason is None:
                raise
            message = f"cannot write checkpoint {step} / {self._folder} / {reason} / free space, --resume"
            raise UserError(message) from error

    def restore(self, template: Any, step: int | None = None) -> tuple[Any, dict[str, Any], int]:
        """(state, extra, step) of the newest or the given checkpoint, after comparing the wiring facts."""
        step = self.latest if step is None else step
        try:
            facts = self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
            extra = facts.pop("extra")
            require(TapSet(facts["taps"]), TapSet(self._facts["taps"]))
            # Of facts that an older version stored under another name, the run's config says the same.
            differing = [key for key, fact in facts.items() if fact != self._facts.get(key, fact)]
            if differing:
                raise UserError(
                    f"checkpoint {step} was made with another {', '.join(differing)} / {self._folder} / "
                    "use the same target, data and --init-from, or another name"
                )
            restore = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, template))
            state = self._manager.restore(step, args=ocp.args.Composite(state=restore))["state"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, AssertionError):
                raise
            words = " ".join(str(error).split())
            raise UserError(
                f"checkpoint {step} cannot be read / {self._folder} / {words} / remove it to go on from an earlier one"
            ) from error
        return state, extra, step

    def best_step(self) -> int | None:
        """The step with the highest held-out tau, the later of equals; None if there is none."""
        return self._manager.best_step()

    @property
    def best_tau(self) -> float:
        """The highest held-out tau of the checkpoints there are; 0 if none has one."""
        best = self.best_step()
        return 0.0 if best is None else self._manager.metrics(best)["simulated_tau"]

    def close(self) -> None:
        self._manager.close()
