"""The run folder: checking and beginning it, the metrics file, provenance. Files appear whole or not at all."""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from eagle3_jax.config import Config, fill_in, parse_yaml
from eagle3_jax.data.files import is_hub
from eagle3_jax.draft.config import NORM_FLAGS
from eagle3_jax.errors import UserError
from eagle3_jax.files import held, write_whole


def check(
    folder: Path, config: Config, resume: bool, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any] | None:
    """Refuses a folder that is another run's, or this run's without `resume`. Returns a finished run's result.

    A run of an older version goes on: the keys that its config lacks are taken at their defaults, which `say` is told.
    """
    try:
        found = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot use the run folder / {folder} / {error.strerror or error}") from error
    if "config.yaml" not in found:
        if kept := [name for name in found if not name.startswith(".") and name != "provenance.json"]:
            raise UserError(f"{folder} holds {kept[0]}, and no config.yaml of a run / choose another name")
        return None
    if not resume:
        raise UserError(f"{folder} exists already / pass --resume to go on with it or choose another name")
    before = _read(folder / "config.yaml", parse_yaml)
    now, added = plain(config), fill_in(before)
    for config_of in (before, now):  # a run may go on with other devices and trackers, and wherever its folder lies
        for key in ("mesh", "tracking", "runs_dir", "name"):
            config_of.pop(key, None)
    if "result.json" not in found:
        _leave_out_places(before, now)
    if differing := _differing(before, now):
        raise UserError(f"{folder} was begun with another config ({differing}) / choose another name")
    if added:
        say(f"{folder} was begun before there was {', '.join(added)}: taken at the default, which trains as it did")
    if "result.json" not in found:
        return None
    if "export" not in found:
        raise UserError(
            f"{folder} is finished, but its export is gone / remove its result.json, and --resume writes it"
        )
    return read_result(folder)


def _leave_out_places(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Of data, and of a target that was moved, the content must be the same and not the path: a checkpoint compares
    that when it is restored, of the target by a sample of its weights."""
    for section, keys in (("target", ("path",)), ("data", ("train", "heldout"))):
        old, new = before.get(section), now[section]
        if isinstance(old, dict) and (section == "data" or _same_place(str(old.get("path")), str(new["path"]))):
            for key in keys:
                old.pop(key, None)
                new.pop(key)


def _same_place(old: str, new: str) -> bool:
    """Whether the paths lead to one folder, or the old one to none any more."""
    return not os.path.exists(old) or os.path.realpath(old) == os.path.realpath(new)


@contextlib.contextmanager
def begin(folder: Path, config: Config, init_from: str | None, date: datetime.date) -> Iterator[None]:
    """Makes the folder and writes config.yaml, after what `init_from` and `date_of` must know of a run that is killed
    right then. Done once all inputs are sound: a mistake must not use up the name. No other process trains into the
    folder until the block ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run folder / {folder} / {error.strerror or error}") from error
    with held(folder):
        if not (folder / "provenance.json").exists():
            write_json(folder / "provenance.json", {"init_from": init_from, "date": date.isoformat()})
        write_text(folder / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False))
        yield


def refuse_busy(folder: Path) -> None:
    """UserError if another process trains into the folder: told at once, and not by `begin` once all is loaded."""
    if folder.is_dir():
        with held(folder):
            pass


def init_from(folder: Path, given: str | None) -> str | None:
    """The draft that a run starts from: as given, or, of a run that has begun, the one it began with."""
    if not (folder / "provenance.json").exists():
        return given
    before = _read(folder / "provenance.json").get("init_from")
    if given is not None and given != before:
        raise UserError(f"{folder} was begun with --init-from {before}, not {given} / leave it out, or another name")
    return before


def date_of(folder: Path) -> datetime.date:
    """The day on which a run began, which chat templates may write; today for a new one."""
    file = folder / "provenance.json"
    stated = _read(file).get("date") if file.exists() else None  # older versions do not state it
    try:
        return datetime.date.today() if stated is None else datetime.date.fromisoformat(stated)
    except (TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged: its date is {stated!r} / restore it, or choose another name") from error


def require_room(folder: Path, checkpoint: int, keep: int) -> None:
    """Refuses a run whose checkpoints (newest, best and one being written) would not fit the disk."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    needed = 0 if (folder / "checkpoints").exists() else (keep + 2) * checkpoint
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"checkpoints need {needed / 1e9:.4g} GB, {free / 1e9:.4g} GB are free / {folder} / free space, or "
            "runs_dir=ELSEWHERE"
        )


def read_result(folder: Path) -> dict[str, Any]:
    """result.json of a finished run."""
    return _read(folder / "result.json")


def _read(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """What a file of a run holds. UserError if it cannot be read, or is damaged."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read {path} / {reason} / restore it, or choose another name") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no mapping / restore it, or choose another name")
    return content


def plain(config: Config) -> dict[str, Any]:
    """The config as YAML types."""
    return json.loads(config.model_dump_json())


def _differing(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> str:
    """The first difference in words, empty if there is none; null is the same as no such key."""
    for key in {**a, **b}:
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            if inside := _differing(x, y, f"{prefix}{key}."):
                return inside
        elif x != y:
            return f"{prefix}{key}: {x} there, {y} here"
    return ""


def write_provenance(
    folder: Path, config: Config, target, draft, packed, documents, covered: float, init_from, date: datetime.date
) -> None:
    """Command, versions, commit, machine, target, wiring, data and first draft of the run."""
    files = [config.data.train] if isinstance(config.data.train, str) else config.data.train
    write_json(
        folder / "provenance.json",
        {
            "command": sys.argv,
            "commit": _commit(),
            "init_from": init_from,
            "date": date.isoformat(),
            "versions": {name: metadata.version(name) for name in ("eagle3-jax", "jax", "flax", "optax", "numpy")},
            "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "device": str(jax.devices()[0])},
            "target": {"path": target.path, "fingerprint": target.fingerprint},
            "wiring": {
                "taps": list(draft.taps),
                "words": draft.taps.words(target.num_layers),
                "norms": [flag for flag in NORM_FLAGS if getattr(draft.config, flag)],
                "draft_vocabulary": draft.config.draft_vocab_size,
                "target_vocabulary": target.config.vocab_size,
            },
            "data": {file: "of the hub" if is_hub(file) else _digest(Path(file)) for file in files},
            "packing": vars(packed.report),
            "statistics": statistics(documents) | {"coverage": round(covered, 5)},
            "duplicate_documents": documents.duplicates,
            "refused_rows": documents.refused,
            "first_refusal": documents.first_refusal,
        },
    )


def statistics(documents) -> dict[str, Any]:
    """Lengths of documents and of what is supervised in them ([least, median, 90 %, most]); documents by source."""
    lengths = np.array([len(ids) for ids, _ in documents.items])
    supervised = np.array([int(mask.sum()) for _, mask in documents.items])

    def spread(values: np.ndarray) -> list[int]:
        return np.quantile(values, [0, 0.5, 0.9, 1], method="nearest").astype(int).tolist()

    return {
        "lengths": {"all": spread(lengths), "supervised": spread(supervised)},
        "sources": dict(Counter(documents.sources).most_common(20)),
    }


def _commit() -> str | None:
    """The git commit of this code, with `+` if the checkout differs from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD")[:12] + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or a checkout of another user
        return None


def _digest(path: Path) -> str:
    """Hash of a file; of a folder of stored features the hash of its files' names and sizes, which may be terabytes."""
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    listing = sorted((str(f.relative_to(path)), f.stat().st_size) for f in path.rglob("*") if f.is_file())
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]


def write_json(path: Path, value: Any) -> None:
    """Writes the file whole or not at all. Raises UserError if it cannot be written."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes the file whole or not at all. Raises UserError if it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path} / {error.strerror or error} / free space, --resume") from error


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} / {error} / restore it, or remove it") from error


class Metrics:
    """metrics.jsonl, one line a step. On resume, lines after the restored step (and a torn one) are dropped."""

    def __init__(self, path: Path | None, step: int):
        self._path = path
        if path is None:  # another process writes it
            return
        kept = []
        if path.exists():
            for line in _lines(path):
                try:
                    if json.loads(line)["step"] > step:
                        break
                except (ValueError, KeyError, TypeError):
                    break  # the line a killed run was writing; nothing follows it
                kept.append(line)
        write_text(path, "".join(line + "\n" for line in kept))

    def write(self, row: dict[str, Any]) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self._path} / {error.strerror or error} / free space, --resume") from error
