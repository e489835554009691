"""Rotary position embeddings, all variants: default, linear, dynamic NTK, llama3, YaRN, LongRoPE.

Half-split ("rotate_half", NeoX) pairing; a rotation of fewer dimensions than a head has leaves the rest as it is.
Frequencies follow Hugging Face `modeling_rope_utils` so that a checkpoint
means the same here; the transformers-5 key `rope_parameters` and the older `rope_theta` + `rope_scaling` are read.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.errors import UserError

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "factor", "attention_factor"),
}
_REQUIRED = {"default": 0, "linear": 1, "dynamic": 1, "llama3": 4, "yarn": 1, "longrope": 3}  # of _KEYS


@dataclass(frozen=True)
class RopeConfig:
    """Static description of the rotation. `scaling` holds the variant's own numbers, as (key, value) pairs.

    head_dim: how many dimensions of a head are rotated, all of them but in families with partial rotation.
    """

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


def rope_from_hf(
    config: dict[str, Any],
    head_dim: int,
    layer_type: str | None = None,
    default_theta: float = 10000.0,
    partial: bool = False,
) -> RopeConfig:
    """Reads rope facts from a config.json dictionary (transformers 4 or 5 style); refuses what it does not know.

    layer_type: whose rotation is meant where rope_parameters has one a layer type; None = they must be equal.
    default_theta: of a config that has none. partial: the family can rotate a part of each head.
    mrope_section says how the positions of images are rotated; of text this is the plain rotation, and it is kept only
    to be written again.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{key} in config.json is {value!r} / it must be an object or null")
    by_layer = {key: value for key, value in (new or {}).items() if isinstance(value, dict)}
    if by_layer:
        first = next(iter(by_layer.values()))
        if layer_type is None and any(value != first for value in by_layer.values()):
            raise UserError(f"rope_parameters in config.json differ by layer type ({new}) / one rotation is supported")
        new = by_layer.get(layer_type, {}) if layer_type else first
    if new and old and any(k != "type" and new.get(k) != v for k, v in old.items()):
        raise UserError(f"config.json has rope_parameters {new} and another rope_scaling {old} / keep one of them")
    parameters = dict(new or old or {})
    legacy_kind = parameters.pop("type", None)
    kind = parameters.pop("rope_type", None) or legacy_kind or "default"
    if kind == "mrope" and "mrope_section" in parameters:
        kind = "default"
    inner, outer = parameters.pop("rope_theta", None), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise UserError(f"config.json has rope_theta {outer} and inside its rope parameters {inner} / keep one of them")
    theta = default_theta if inner is None and outer is None else outer if inner is None else inner
    if kind not in _KINDS:
        raise UserError(f"rope type {kind!r} in config.json is not supported / supported: {', '.join(_KINDS)}")
    share = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise UserError(f"partial_rotary_factor {share} in config.json is not supported / only full rotation is")
    _check_numbers({"partial_rotary_factor": share})
    rotated = int(head_dim * share)
    rounds_up = kind == "default" and rotated < head_dim  # transformers then rotates one dimension more
    if (rotated % 2 and not rounds_up) or not 0 < rotated <= head_dim:
        raise UserError(f"config.json rotates {rotated} of {head_dim} dimensions of a head / an even number is needed")
    lists = ("short_factor", "long_factor")
    no_numbers = ("truncate", *lists)
    _check_numbers({"rope_theta": theta} | {key: parameters.get(key) for key in _KEYS[kind] if key not in no_numbers})
    if not isinstance(parameters.get("truncate"), bool | None):
        raise UserError(f"truncate in config.json is {parameters['truncate']!r} / it must be true or false")
    max_positions = config.get("max_position_embeddings") or 2048
    if kind in ("llama3", "yarn", "longrope"):
        _original_window(parameters, config, max_positions)
    if kind == "longrope":
        for key in lists:
            parameters[key] = _factors(key, parameters.get(key), rotated // 2)
    if kind == "yarn" and parameters.get("factor") is None:
        parameters["factor"] = max_positions / parameters["original_max_position_embeddings"]
    unknown = sorted(k for k in parameters if k not in _KEYS[kind] and parameters[k] is not None)
    if unknown and kind != "default":
        raise UserError(f"rope type {kind!r} does not know {unknown} in config.json / known: {list(_KEYS[kind])}")
    missing = [k for k in _KEYS[kind][: _REQUIRED[kind]] if parameters.get(k) is None]
    if missing:
        raise UserError(f"rope type {kind!r} in config.json lacks {missing}")
    sections = _sections(parameters) if kind == "default" else {}
    scaling = tuple(sorted({k: v for k, v in parameters.items() if k in _KEYS[kind]}.items() | sections.items()))
    return RopeConfig(rotated, float(theta), kind, int(max_positions), scaling)


def _sections(parameters: dict[str, Any]) -> dict[str, Any]:
    """How many dimensions turn with time, height and width of an image, hashable."""
    parts = parameters.get("mrope_section")
    if parts is None:
        return {}
    if not (isinstance(parts, list) and all(type(part) is int and part > 0 for part in parts)):
        raise UserError(f"mrope_section in config.json is {parts!r} / it must be a list of positive integers")
    interleaved = {"mrope_interleaved": True} if parameters.get("mrope_interleaved") else {}
    return {"mrope_section": tuple(parts), **interleaved}


def _original_window(parameters: dict[str, Any], config: dict[str, Any], max_positions: int) -> None:
    """Sets original_max_position_embeddings, which Phi keeps outside of the rope parameters."""
    key = "original_max_position_embeddings"
    outer, inner = config.get(key), parameters.get(key)
    if outer is not None and inner is not None and outer != inner:
        raise UserError(f"config.json has {key} {outer} and inside its rope parameters {inner} / keep one of them")
    parameters[key] = inner or outer or max_positions
    _check_numbers({key: parameters[key]})


def _factors(key: str, values: Any, count: int) -> tuple[float, ...]:
    numbers = isinstance(values, list | tuple) and all(type(v) in (int, float) and v > 0 for v in values)
    if not numbers or len(values) != count:
        raise UserError(f"{key} in config.json must be {count} positive numbers / it is {str(values)[:80]}")
    return tuple(float(v) for v in values)


def _check_numbers(values: dict[str, Any]) -> None:
    for key, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and (0 < value < math.inf or (value == 0 and key.startswith("mscale")))):
            raise UserError(f"{key} in config.json is {value!r} / it must be a positive number")


def rotary(
    rope: RopeConfig, positions: Int[Array, "B T"], lengths: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """cos and sin [B, T, head_dim/2] float32 for each position.

    lengths: sequence length each position belongs to, used by dynamic NTK (its base grows with the length) and by
        LongRoPE (beyond the original window it takes the other factors). For the latter it is the most tokens that the
        text may come to, so that all keys in a cache have the same factors;
        None means position + 1, the length at which that token is written to a cache.
    """
    inverse = _inverse_frequencies(rope, positions + 1 if lengths is None else lengths)
    angles = positions[..., None].astype(jnp.float32) * inverse
    scale = _attention_factor(rope)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "B T N D"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T N D"]:
    """Rotates heads x [B, T, heads, head_dim] by the angles of their positions, in float32, keeping x's dtype.

    Where there are fewer angles than half a head, the dimensions behind those that are rotated stay as they are.
    """
    half = cos.shape[-1]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


def _inverse_frequencies(rope: RopeConfig, lengths: Int[Array, "B T"]) -> Array:
    """[half] frequencies, or [B, T, half] where they depend on the length."""
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
    if rope.kind == "longrope":
        short, long = (jnp.asarray(rope.get(key), jnp.float32) for key in ("short_factor", "long_factor"))
        beyond = lengths > rope.get("original_max_position_embeddings")
        return plain / jnp.where(beyond[..., None], long, short)
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
    ramp = jnp.clip((jnp.arange(dim // 2, dtype=jnp.float32) - low) / (high - low or 0.001), 0, 1)
    return plain / rope.get("factor") * ramp + plain * (1 - ramp)


def _attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by."""
    given, factor = rope.get("attention_factor"), rope.get("factor")
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if given is not None:
        return given
    if rope.kind == "longrope":
        window = rope.get("original_max_position_embeddings")
        factor = rope.max_positions / window if factor is None else factor
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(window))

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope.get("mscale")) / mscale(rope.get("mscale_all_dim"))
    return mscale(1.0)
