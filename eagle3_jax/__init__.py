"""EAGLE-3 speculative decoding in JAX: train a draft for a frozen target and generate faster with the pair."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle3_jax.draft.draft import Draft, load_draft, save_draft
    from eagle3_jax.errors import UserError
    from eagle3_jax.models.target import Target, load_target
    from eagle3_jax.speculate.generate import Result, generate
    from eagle3_jax.speculate.request import SamplingParams
    from eagle3_jax.taps import Taps, TapSet, WiringError, fuse

# Where each public name lives. Imported on first use: JAX takes seconds, and `eagle3 --help` needs none of it.
_HOMES = {
    "eagle3_jax.draft.draft": ("Draft", "load_draft", "save_draft"),
    "eagle3_jax.errors": ("UserError",),
    "eagle3_jax.models.target": ("Target", "load_target"),
    "eagle3_jax.speculate.generate": ("Result", "generate"),
    "eagle3_jax.speculate.request": ("SamplingParams",),
    "eagle3_jax.taps": ("Taps", "TapSet", "WiringError", "fuse"),
}

__all__ = [
    "Draft",
    "Result",
    "SamplingParams",
    "Target",
    "TapSet",
    "Taps",
    "UserError",
    "WiringError",
    "fuse",
    "generate",
    "load_draft",
    "load_target",
    "save_draft",
]


def __getattr__(name: str):
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
