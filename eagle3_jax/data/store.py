"""Our own store of a target's features: written by `training.make_store`, read like those of others.

    DIR/index.json               what the states are: taps, target, dtype; the shards with their documents
    DIR/shard-00000.safetensors  ids, mask, lengths; states [tokens, taps + 1, H] as bfloat16 bits, or int8 with a scale
                                 for each token and state; the last state is the last block's output, before the norm

Shards are written whole or not at all, and each document has a checksum that is compared whenever it is read. Documents
are read alone, in any order: a `FeatureStore` is a random-access source as grain's loaders take them.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from eagle3_jax.data.foreign.sample import Sample, Says
from eagle3_jax.errors import UserError

NAME, VERSION = "eagle3-jax features", 1
DTYPES = {"bfloat16": 2, "int8": 1}  # bytes of a number


def is_store(path: str | Path) -> bool:
    """Whether a folder is one of these stores, finished or begun."""
    return (Path(path) / "index.json").exists() or (Path(path) / "begun.json").exists()


def bytes_a_token(states: int, hidden_size: int, dtype: str) -> int:
    """Disk that a token takes: its states, scales, id and mask."""
    return states * (hidden_size * DTYPES[dtype] + (4 if dtype == "int8" else 0)) + 5


def encode(states: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """float [T, S, H] as stored: bfloat16 as its bits, int8 by the largest size of each row."""
    if dtype == "bfloat16":
        return {"states": states.astype(ml_dtypes.bfloat16).view(np.uint16)}
    scales = np.abs(states.astype(np.float32)).max(-1) / 127
    rows = states.astype(np.float32) / np.maximum(scales, 1e-30)[..., None]
    return {"states": np.rint(rows).astype(np.int8), "scales": scales.astype(np.float32)}


def decode(states: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """The inverse: bfloat16, or float32 from int8."""
    return states.view(ml_dtypes.bfloat16) if scales is None else states.astype(np.float32) * scales[..., None]


class FeatureStore:
    """A finished store. len() documents; store[i] is {"input_ids", "loss_mask", "states": [T, S, H]}.

    Raises UserError for a store that is unfinished, of another version, or lacks a shard; on reading, for damage.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.facts: dict[str, Any] = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UserError(f"the store is unfinished / {folder} / run the same `data features` again") from error
        except ValueError as error:
            raise UserError(f"index.json is not valid JSON / {folder} / make the store again") from error
        if not isinstance(self.facts, dict) or self.facts.get("format") != NAME or self.facts.get("version") != VERSION:
            raise UserError(f"not a store of version {VERSION} / {folder} / make it with this version")
        try:
            self._places = self._find_places()
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"index.json is damaged ({error}) / {folder} / make the store again") from error

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        ids, mask = self.text(index)
        return {"input_ids": ids, "loss_mask": mask, "states": self.states(index)}

    def text(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [T], mask bool [T]) of a document."""
        ids, mask = self._read(index, "input_ids", "loss_mask")
        return ids, mask.astype(bool)

    def states(self, index: int) -> np.ndarray:
        """States [T, S, H] of a document, in the order of `facts["taps"]`, then the last hidden state."""
        quantised = self.facts["dtype"] == "int8"
        names = ("states", "scales") if quantised else ("states",)
        found = self._read(index, *names)
        if checksum_of(*found) != self._places[index][3]:
            raise UserError(
                f"document {index} is damaged / {self.folder / self._places[index][0]} / remove index.json and both "
                "files of the shard, and run the same `data features` again"
            )
        return decode(found[0], found[1] if quantised else None)

    def samples(self) -> list[Sample]:
        """The documents as samples, for the reader that all stored features share."""
        taps = tuple(self.facts["taps"])
        says = Says(taps, "block-input", "pre-norm", "index.json")
        names = (*(f"tap {tap}" for tap in taps), "last_hidden")
        found = []
        for i, (file, *_) in enumerate(self._places):
            ids, mask = self.text(i)
            path, size = self.folder / file, self.facts["hidden_size"]
            found.append(
                Sample(path, NAME, ids, mask, names, size, True, says, lambda i=i: list(self._states_first(i)))
            )
        return found

    def require_target(self, fingerprint: dict[str, Any], tokenizer: str | None, path: str) -> None:
        """UserError unless the store was made with this very target and, where both are known, its tokenizer."""
        if self.facts["target"] != fingerprint["hash"]:
            raise UserError(f"the store was made with another target than {path} / {self.folder} / make it again")
        own = self.facts.get("tokenizer")
        if own and tokenizer and own != tokenizer:
            raise UserError(
                f"the store was made with another tokenizer than that of {path} / {self.folder} / make it again"
            )

    def _find_places(self) -> list[tuple[str, int, int, int]]:
        """Of each document its shard, begin, end and checksum."""
        places = []
        for key in ("taps", "hidden_size", "dtype", "target"):
            self.facts[key]  # is needed later
        for shard in self.facts["shards"]:
            if not (self.folder / shard["file"]).exists():
                raise UserError(f"{shard['file']} is missing / {self.folder} / copy it again")
            begin = 0
            for length, checksum in zip(shard["lengths"], shard["checksums"], strict=True):
                places.append((shard["file"], begin, begin + length, checksum))
                begin += length
        return places

    def _states_first(self, index: int) -> np.ndarray:
        return self.states(index).swapaxes(0, 1)

    def _read(self, index: int, *names: str) -> list[np.ndarray]:
        file, begin, end, _ = self._places[index]
        try:
            with safe_open(self.folder / file, framework="np") as shard:
                return [np.asarray(shard.get_slice(name)[begin:end]) for name in names]
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read the shard / {self.folder / file} / {error}; it may be torn") from error


def checksum_of(*arrays: np.ndarray) -> int:
    """CRC-32 of the bytes of arrays, one after another."""
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1), found)
    return found
