"""EAGLE-3 speculative decoding in JAX: train a draft for a frozen target and generate faster with the pair."""

from eagle3_jax.draft.draft import Draft, load_draft, save_draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target, load_target
from eagle3_jax.speculate.generate import Result, generate
from eagle3_jax.taps import Taps, TapSet, WiringError, fuse

__all__ = [
    "Draft",
    "Result",
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
