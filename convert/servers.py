"""What servers do with a draft folder as it lies there, silent failures included (spec sections 1, 2, 6 and 8).

Learned from their loaders. Versions differ, so a finding says "older" or "newer" where they do. Serving engines never
compare the wiring with the draft's training: a wrong capture runs, and accepts less.
"""

from dataclasses import dataclass
from typing import Any

from convert import flat
from eagle3_jax.draft.draft import Draft

_DEFAULT = "(2, N//2, N-3)"


@dataclass(frozen=True)
class Folder:
    """A draft with the facts of its files. taps_known: whether the file (or the user) says which taps it reads.

    num_layers: of the target, where known.
    """

    draft: Draft
    raw: dict[str, Any]
    names: frozenset[str]
    format: str
    taps_known: bool
    num_layers: int | None = None

    @property
    def top_ids(self) -> list[int] | None:
        return self.raw.get("eagle_aux_hidden_state_layer_ids")

    @property
    def nested_ids(self) -> list[int] | None:
        return (self.raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")

    def stores(self, name: str) -> bool:
        """Whether the files hold a tensor, by its canonical name."""
        return any(stored.removeprefix("model.") == name for stored in self.names)

    @property
    def flags(self) -> list[str]:
        """Options beyond the first EAGLE-3, by the name of the key."""
        return flat.unsupported(self.draft, ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))


def findings(folder: Folder) -> dict[str, list[str]]:
    """{server: [what it does, one sentence each]}; an empty list means that it serves the folder as trained."""
    return {
        "vllm": _vllm(folder),
        "sglang": _sglang(folder),
        "sglang-jax": _jax_servers(folder, flat.unsupported(folder.draft, ("norm_before_residual", "bias"))),
        "tpu-inference": _jax_servers(folder, flat.unsupported(folder.draft, ("bias",))),
    }


def _order(folder: Folder) -> list[str]:
    points = list(folder.draft.taps)
    if not folder.taps_known or points == sorted(points):
        return []
    return [f"silent: captures taps in ascending order, {sorted(points)}, but fc was trained on {points}"]


def _last_output(folder: Folder) -> list[str]:
    last, reads_aux = folder.num_layers, folder.draft.config.use_aux_hidden_state
    if not (folder.taps_known and reads_aux and last in folder.draft.taps):
        return []
    return [f"older versions capture inputs of blocks only: the last block's output (tap {last}) needs a newer one"]


def _vllm(folder: Folder) -> list[str]:
    draft, found = folder.draft, []
    if folder.top_ids is None and draft.config.use_aux_hidden_state:
        where = "only in eagle_config, which older versions do not read" if folder.nested_ids else "nowhere"
        found.append(f"silent: ids are {where}, so it may capture {_DEFAULT} / convert --to speculators")
        if folder.nested_ids and not (folder.taps_known and list(draft.taps) == folder.nested_ids):
            found.append(
                f"silent: versions that read eagle_config take its ids as block inputs, {folder.nested_ids}"
                + (f"; the draft reads {list(draft.taps)}" if folder.taps_known else "")
            )
    found += _order(folder)
    count = len(draft.taps)
    if count != 3 and "num_aux_hidden_states" not in folder.raw and folder.nested_ids is None:
        found.append(f"older versions build fc for 3 taps and fail to load this one with {count}")
    if 0 in draft.taps.points and folder.taps_known:
        found.append("older versions capture before blocks only from 1 on: the embedding (tap 0) needs a newer one")
    found += _last_output(folder)
    late = [flag for flag in folder.flags if flag != "norm_before_residual"]
    if late:
        found.append(f"silent in older versions, which drop {', '.join(late)}")
    if draft.config.decoder.qk_norm:
        found.append("needs a version with Eagle3Qwen3ForCausalLM for q_norm/k_norm")
    cannot = flat.unsupported(draft, ("bias", "use_aux_hidden_state") if folder.format == "speculators" else ("bias",))
    if cannot:
        found.append(f"does not load {', '.join(cannot)}")
    if draft.config.decoder.windows:
        found.append("counts a window from each drafted token, training from the last token with target features")
    return found


def _sglang(folder: Folder) -> list[str]:
    draft, found = folder.draft, []
    if folder.format == "speculators":
        return ["does not read a speculators config / convert --to sglang"]
    if folder.nested_ids is None and draft.config.use_aux_hidden_state:
        where = "top-level, where it does not look" if folder.top_ids else "absent"
        found.append(f"silent: ids are {where}, so it captures {_DEFAULT} / convert --to sglang")
    elif folder.nested_ids and folder.nested_ids[0] != 1:
        found.append(
            f"ids {folder.nested_ids}: the older version adds one to each, the newer (May 2026) takes them as they "
            "are, since the first is not 1"
        )
    found += _last_output(folder)
    found += _order(folder)
    if any(name.startswith("layers.0.") for name in folder.names):
        found.append("silent in older versions, which know midlayer.* only and ignore layers.0.* / convert --to sglang")
    if folder.raw.get("tie_word_embeddings") and folder.stores("lm_head.weight"):
        found.append("silent: uses the embedding as lm_head (tie_word_embeddings), not the lm_head that is stored")
    ignored = flat.unsupported(
        draft,
        ("norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias", "qk_norm", "sliding_window"),
    )
    if ignored:
        found.append(f"silent: ignores {', '.join(ignored)}")
    late = flat.unsupported(draft, ("fc_norm", "norm_output", "num_hidden_layers"))
    if late:
        found.append(f"silent in older versions, which do not know {', '.join(late)}")
    config = draft.config
    if "embed_tokens" in draft.params and config.target_hidden_size == config.decoder.hidden_size:
        found.append("replaces embed_tokens by the target's table, which is right only if the two are equal")
    return found


def _fixed_capture(folder: Folder) -> list[str]:
    """A server that captures the default taps of its target and reads no ids."""
    if not folder.taps_known:
        return [f"captures {_DEFAULT} of the target: the file does not say whether the draft reads them"]
    points = list(folder.draft.taps)
    blocks = points[-1] + 3
    if points != [2, blocks // 2, blocks - 3]:
        return [f"silent: captures {_DEFAULT} of the target whatever the ids say; the draft reads {points}"]
    if folder.num_layers is None:
        return [f"captures {_DEFAULT} of the target: right for one of {blocks} blocks only"]
    return [f"silent: captures {_DEFAULT} of {folder.num_layers} blocks"] if folder.num_layers != blocks else []


def _jax_servers(folder: Folder, ignored: list[str]) -> list[str]:
    """sglang-jax and tpu-inference, whose loaders look up the same fixed list of names."""
    draft, found = folder.draft, []
    if folder.format == "speculators":
        return ["does not read a speculators config / convert --to sglang"]
    if not any(name.startswith("midlayer.") for name in folder.names):
        found.append("silent: looks up midlayer.* only, so the layer stays random / convert --to sglang")
    if not draft.config.use_aux_hidden_state:
        found.append("feeds three taps whatever use_aux_hidden_state says")
    else:
        found += _fixed_capture(folder)
    if draft.config.decoder.num_layers > 1:
        found.append("builds one layer only")
    later = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "qk_norm", "sliding_window")
    ignored = ignored + flat.unsupported(draft, later)
    if ignored:
        found.append(f"silent: ignores {', '.join(ignored)}")
    if folder.raw.get("draft_vocab_size") is None:
        found.append("needs draft_vocab_size in config.json")
    return found
