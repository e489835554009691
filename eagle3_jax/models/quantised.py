"""Checkpoints with quantised weights: products of numbers and scales are multiplied out, one tensor at a time; the rest
is refused by name.

Read: FP8 with scales of blocks (DeepSeek, Qwen), of rows or of whole matrices, INT8 of compressed-tensors and
bitsandbytes, MXFP4 (gpt-oss). Servers also quantise activations with some of these; here they keep their precision.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.errors import UserError
from eagle3_jax.models.weights import TensorFiles

# What lies beside a quantised `X.weight` and is used up with it, or concerns activations and caches only.
_COMPANIONS = (
    *(".weight_scale_inv", ".weight_scale", ".weight_zero_point", ".SCB", ".weight_format"),
    *(".input_scale", ".output_scale", ".k_scale", ".v_scale", "_scales"),
)
_MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def method_of(raw: dict[str, Any], where: str) -> str | None:
    """The quantisation of a config.json, None for none; UserError if it is not one of those read here."""
    facts = raw.get("quantization_config") or raw.get("compression_config")
    if not facts:
        return None
    method = facts.get("quant_method", "unknown")
    name, readable = method, method in ("fp8", "fbgemm_fp8", "mxfp4")
    if method == "compressed-tensors":
        name = f"{method}, format {facts.get('format')}"
        readable = facts.get("format") in ("float-quantized", "int-quantized", "naive-quantized")
        readable &= all(_eight_bits(group) for group in (facts.get("config_groups") or {}).values())
    if method == "bitsandbytes":
        name = f"{method}, {'4 bit' if facts.get('load_in_4bit') else '8 bit'}"
        readable = bool(facts.get("load_in_8bit")) and not facts.get("load_in_4bit")
    if method == "modelopt":
        name = f"{method}, {facts.get('quant_algo')}"
        readable = facts.get("quant_algo") == "FP8"
    if not readable:
        raise UserError(
            f"weights quantised with {name!r} cannot be read / {where} / use an unquantised, FP8 or INT8 copy"
        )
    return method


def _eight_bits(group: Any) -> bool:
    weights = group.get("weights") if isinstance(group, dict) else None
    return isinstance(weights, dict) and weights.get("num_bits") == 8


def dequantised(raw: dict[str, Any], files: TensorFiles, where: str) -> Iterator[tuple]:
    """(name, array) of every tensor under the name it would have unquantised; experts in MXFP4 come one by one, as
    (name, array, expert)."""
    method = method_of(raw, where)
    if method is None:
        yield from files.items()
        return
    block = raw["quantization_config"].get("weight_block_size") if method == "fp8" else None
    for name in files:
        if name.endswith("_blocks") and method == "mxfp4":
            yield from _mxfp4(name.removesuffix("_blocks"), files)
        elif not name.endswith(_COMPANIONS):
            yield name, _multiplied(name, files, block, where)


def _multiplied(name: str, files: TensorFiles, block: list[int] | None, where: str) -> np.ndarray:
    array = files.read(name)
    layer = name.removesuffix(".weight")
    if f"{layer}.SCB" in files:  # bitsandbytes: rows scaled by their largest value
        return array.astype(np.float32) * (files.read(f"{layer}.SCB")[:, None] / 127)
    if f"{layer}.weight_scale_inv" in files:
        scale = files.read(f"{layer}.weight_scale_inv").astype(np.float32)
        if scale.ndim == 2:
            rows, columns = block or (128, 128)
            scale = np.repeat(np.repeat(scale, rows, axis=0)[: array.shape[0]], columns, axis=1)[:, : array.shape[1]]
        return array.astype(np.float32) * scale
    if f"{layer}.weight_scale" in files:
        scale = files.read(f"{layer}.weight_scale").astype(np.float32)
        zero = files.read(f"{layer}.weight_zero_point") if f"{layer}.weight_zero_point" in files else np.zeros(1)
        if scale.ndim == 1 and scale.size > 1:
            scale, zero = scale[:, None], zero.reshape(-1, 1)
        if scale.ndim == 2 and scale.shape[1] not in (1, array.shape[1]):
            raise UserError(f"{name} has scales of groups, {list(scale.shape)} / {where} / use an unquantised copy")
        return (array.astype(np.float32) - zero.astype(np.float32)) * scale
    if array.dtype.itemsize == 1:
        raise UserError(f"{name} is {array.dtype} and has no scale beside it / {where} / copy the model again")
    return array


def _mxfp4(name: str, files: TensorFiles) -> Iterator[tuple[str, np.ndarray, int]]:
    """Two 4-bit numbers a byte, the lower first, 32 to a scale, which is a power of two; exact in bfloat16.

    Stored [E, out, groups, 16] and given as [in, out], as these kernels are stored unquantised.
    """
    blocks, scales = files.read(f"{name}_blocks"), files.read(f"{name}_scales")
    for expert, (block, scale) in enumerate(zip(blocks, scales, strict=True)):
        pairs = np.stack([_MXFP4[block & 15], _MXFP4[block >> 4]], axis=-1)
        values = np.ldexp(pairs.reshape(*scale.shape, 32), scale[..., None].astype(np.int32) - 127)
        yield name, values.reshape(scale.shape[0], -1).astype(jnp.bfloat16).T, expert
