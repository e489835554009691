"""Rotary position embeddings, all Llama-family variants: default, linear, dynamic NTK, llama3, YaRN.

Half-split ("rotate_half", NeoX) pairing. Frequencies follow Hugging Face `modeling_rope_utils` so that a checkpoint
means the same here; the transformers-5 key `rope_parameters` and the older `rope_theta` + `rope_scaling` are read.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.errors import UserError

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """Static description of the rotation. `scaling` holds the variant's own numbers, as (key, value) pairs."""

    head_dim: int
    theta: float
    kind: str
    max_positions: int
    scaling: tuple[tuple[str, Any], ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        value = dict(self.scaling).get(key)
        return default if value is None else value

    def to_hf(self) -> dict[str, Any]:
        """The transformers-5 `rope_parameters` dictionary."""
        return {"rope_type": self.kind, "rope_theta": self.theta, **dict(self.scaling)}


def rope_from_hf(config: dict[str, Any], head_dim: int) -> RopeConfig:
    """Reads rope facts from a config.json dictionary (transformers 4 or 5 style); refuses what it does not know."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{key} in config.json is {value!r} / it must be an object or null")
    by_layer = [value for value in (new or {}).values() if isinstance(value, dict)]  # one rotation a layer type
    if by_layer:
        if any(value != by_layer[0] for value in by_layer):
            raise UserError(f"rope_parameters in config.json differ by layer type ({new}) / one rotation is supported")
        new = by_layer[0]
    if new and old and any(k != "type" and new.get(k) != v for k, v in old.items()):
        raise UserError(f"config.json has rope_parameters {new} and another rope_scaling {old} / keep one of them")
    parameters = dict(new or old or {})
    legacy_kind = parameters.pop("type", None)
    kind = parameters.pop("rope_type", None) or legacy_kind or "default"
    inner, outer = parameters.pop("rope_theta", None), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise UserError(f"config.json has rope_theta {outer} and inside its rope parameters {inner} / keep one of them")
    theta = 10000.0 if inner is None and outer is None else outer if inner is None else inner
    if kind not in _KINDS:
        raise UserError(f"rope type {kind!r} in config.json is not supported / supported: {', '.join(_KINDS)}")
    partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UserError(f"partial_rotary_factor {partial} in config.json is not supported / only full rotation is")
    _check_numbers({"rope_theta": theta} | {key: parameters.get(key) for key in _KEYS[kind] if key != "truncate"})
    max_positions = config.get("max_position_embeddings") or 2048
    if kind in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", max_positions)
    if kind == "yarn" and parameters.get("factor") is None:
        parameters["factor"] = max_positions / parameters["original_max_position_embeddings"]
    unknown = sorted(k for k in parameters if k not in _KEYS[kind] and parameters[k] is not None)
    if unknown and kind != "default":
        raise UserError(f"rope type {kind!r} does not know {unknown} in config.json / known: {list(_KEYS[kind])}")
    missing = [k for k in _KEYS[kind][: 4 if kind == "llama3" else 1] if parameters.get(k) is None]
    if missing:
        raise UserError(f"rope type {kind!r} in config.json lacks {missing}")
    scaling = tuple(sorted((k, v) for k, v in parameters.items() if k in _KEYS[kind]))
    return RopeConfig(head_dim, float(theta), kind, int(max_positions), scaling)


def _check_numbers(values: dict[str, Any]) -> None:
    for key, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and (0 < value < math.inf or (value == 0 and key.startswith("mscale")))):
            raise UserError(f"{key} in config.json is {value!r} / it must be a positive number")


def rotary(
    rope: RopeConfig, positions: Int[Array, "B T"], lengths: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """cos and sin [B, T, head_dim/2] float32 for each position.

    lengths: sequence length each position belongs to, used by dynamic NTK only (its base grows with the length);
        None means position + 1, the length at which that token is written to a cache.
    """
    inverse = _inverse_frequencies(rope, positions + 1 if lengths is None else lengths)
    angles = positions[..., None].astype(jnp.float32) * inverse
    scale = _attention_factor(rope)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T N D"]:
    """Rotates heads x [B, T, heads, head_dim] by the angles of their positions, in float32, keeping x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _inverse_frequencies(rope: RopeConfig, lengths: Int[Array, "B T"]) -> Array:
    """[half] frequencies, or [B, T, half] for dynamic NTK."""
    dim = rope.head_dim
    exponents = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    plain = 1.0 / (jnp.float32(rope.theta) ** exponents)
    if rope.kind == "linear":
        return plain / rope.get("factor")
    if rope.kind == "dynamic":
        factor, window = rope.get("factor"), rope.max_positions
        length = jnp.maximum(lengths, window).astype(jnp.float32)
        base = rope.theta * (factor * length / window - (factor - 1)) ** (dim / (dim - 2))
        return 1.0 / (base[..., None] ** exponents)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: RopeConfig, plain: Array) -> Array:
    """Low frequencies divided by the factor, high ones kept, a ramp between (Llama 3.1)."""
    factor, low, high = rope.get("factor"), rope.get("low_freq_factor"), rope.get("high_freq_factor")
    window = rope.get("original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    smooth = (window / wavelength - low) / (high - low)
    ramp = (1 - smooth) * plain / factor + smooth * plain
    scaled = jnp.where(wavelength > window / low, plain / factor, plain)
    between = (wavelength <= window / low) & (wavelength >= window / high)
    return jnp.where(between, ramp, scaled)


def _yarn(rope: RopeConfig, plain: Array) -> Array:
    """Interpolated and extrapolated frequencies blended over a range of dimensions (YaRN, arXiv 2309.00071)."""
    dim, window = rope.head_dim, rope.get("original_max_position_embeddings")

    def dimension(rotations: float) -> float:
        return dim * math.log(window / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.get("beta_fast", 32.0)), dimension(rope.get("beta_slow", 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = jnp.clip((jnp.arange(dim // 2, dtype=jnp.float32) - low) / (max(high - low, 0) or 0.001), 0, 1)
    return plain / rope.get("factor") * ramp + plain * (1 - ramp)


def _attention_factor(rope: RopeConfig) -> float:
    if rope.kind != "yarn":
        return 1.0
    given, factor = rope.get("attention_factor"), rope.get("factor")
    if given is not None:
        return given

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope.get("mscale")) / mscale(rope.get("mscale_all_dim"))
    return mscale(1.0)
