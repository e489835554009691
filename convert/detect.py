"""Which format a draft folder is in, by its content; kinds of draft that are not supported are refused by name."""

from types import ModuleType
from typing import Any

from convert import modelopt, safeailab, sglang, speculators
from eagle3_jax.draft.draft import Checkpoint
from eagle3_jax.draft.folder import Tensors, canonical_names
from eagle3_jax.errors import UserError
from eagle3_jax.taps import TapSet

# In the order in which they are tried: ModelOpt's marks are a special case of SGLang's.
FORMATS: dict[str, ModuleType] = {
    "speculators": speculators,
    "modelopt": modelopt,
    "sglang": sglang,
    "safeailab": safeailab,
}


def detect(raw: dict[str, Any], stored: Tensors, where: str) -> str:
    """The name of the format in FORMATS. Raises UserError for another kind of draft, named, or for no draft at all."""
    refuse_other_kinds(raw, stored, where)
    for name, module in FORMATS.items():
        if module.looks_like(raw, set(stored)):
            return name
    architecture = ", ".join(raw.get("architectures") or ["no architecture"])
    raise UserError(
        f"no EAGLE-3 draft is known by these contents ({architecture}; {len(stored)} tensors, no draft vocabulary) / "
        f"{where} / is it the target? name the draft's folder"
    )


def read_foreign(
    raw: dict[str, Any],
    stored: Tensors,
    where: str,
    taps: TapSet | None,
    convention: str | None,
    num_layers: int | None,
) -> Checkpoint:
    """A draft that is not in our own layout, in canonical form."""
    return FORMATS[detect(raw, stored, where)].read(raw, stored, where, taps, convention, num_layers)


def refuse_other_kinds(raw: dict[str, Any], stored: Tensors, where: str) -> None:
    """UserError for drafts of other algorithms and shapes."""
    names = canonical_names(stored, where)
    architecture = " ".join(raw.get("architectures") or [])
    eagle = raw.get("eagle_config") or {}
    hidden = (raw.get("transformer_layer_config") or raw).get("hidden_size")
    width = names["fc.weight"].shape[-1] if "fc.weight" in names and names["fc.weight"].ndim == 2 else 0
    has_layer = any(name.startswith("layers.0.self_attn.") for name in names)
    kinds = {
        "P-EAGLE (parallel drafting)": "mask_hidden" in names
        or "peagle" in f"{architecture} {raw.get('speculators_model_type')}".lower()
        or raw.get("pard_token") is not None
        or raw.get("mask_token_id") is not None,
        "Medusa or parallel-head": eagle.get("parallel_draft_step") not in (None, 0, 1)
        or any(name.startswith(("parallel_draft_heads.", "medusa_heads.")) for name in names),
        "MLA (DeepSeek or Kimi attention)": any("kv_a_proj_with_mqa" in name for name in names)
        or "DeepseekV2" in architecture,
        "DFlash": "dflash_config" in raw or "dflash" in architecture.lower(),
        "EAGLE-1 or EAGLE-2": has_layer
        and "layers.0.hidden_norm.weight" not in names
        and "lm_head.weight" not in names
        and width == 2 * (hidden if isinstance(hidden, int) else -1),
    }
    for kind, found in kinds.items():
        if found:
            raise UserError(f"this is a {kind} draft, which is not supported / {where} / use an EAGLE-3 draft")
