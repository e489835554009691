"""The facts of a target that conversion needs, read without loading it: block count, sizes, embedding table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models import gguf
from eagle3_jax.models.families.text_parts import lifted
from eagle3_jax.models.target import resolve
from eagle3_jax.models.weights import read_json, read_tensors, safetensors_files


@dataclass(frozen=True)
class TargetFacts:
    path: Path
    num_layers: int
    hidden_size: int
    vocab_size: int
    architectures: tuple[str, ...]
    max_positions: int | None

    def check(self, draft: Draft) -> None:
        """UserError or WiringError unless the draft's sizes and taps fit this target."""
        config = draft.config
        config.taps.check(self.num_layers)
        pairs = [
            ("hidden_size", config.target_hidden_size, self.hidden_size),
            ("vocab_size", config.decoder.vocab_size, self.vocab_size),
        ]
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise UserError(f"the draft belongs to another target: {name} {ours} against {theirs} / {self.path}")

    def embedding(self) -> np.ndarray | None:
        """The embedding table, None where the target is no safetensors folder."""
        if not self.path.is_dir():
            return None
        for name, array in read_tensors(safetensors_files(self.path)):
            if name.endswith("embed_tokens.weight"):
                return array
        return None


def target_facts(path: str) -> TargetFacts:
    """Reads config.json of a folder (the language model's part of a multimodal one) or a GGUF's header."""
    place = resolve(path)
    raw: dict[str, Any] = gguf.gguf_config(place) if place.suffix == ".gguf" else read_json(place / "config.json")
    architectures = tuple(raw.get("architectures") or ["LlamaForCausalLM"])
    raw = lifted(raw, ())
    raw = raw.get("text_config") or raw
    missing = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if not isinstance(raw.get(key), int)]
    if missing:
        raise UserError(f"the target's config lacks {', '.join(missing)} / {place} / name the target's own folder")
    sizes = (raw["num_hidden_layers"], raw["hidden_size"], raw["vocab_size"])
    return TargetFacts(place, *sizes, architectures, raw.get("max_position_embeddings"))
