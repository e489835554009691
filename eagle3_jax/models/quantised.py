"""Checkpoints with quantised weights: products of numbers and scales are multiplied out, one tensor at a time; the rest
is refused by name.

Read: FP8 with scales of blocks (DeepSeek, Qwen), of rows or of whole matrices, INT8 of compressed-tensors and
bitsandbytes, MXFP4 (gpt-oss). Servers also quantise activations with some of these; here they keep their precision.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.errors import UserError
from eagle3_jax.models.weights import TensorFiles, read_json

# What lies beside a quantised `X.weight` and is used up with it, or concerns activations and caches only.
_COMPANIONS = (
    *(".weight_scale_inv", ".weight_scale", ".weight_zero_point", ".SCB", ".weight_format"),
    *(".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", "_scales"),
)
# Files in which some tools state the quantisation that config.json does not.
_BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
# What tensors are called in formats that are not read, should no file state them.
_MARKS = {
    ".g_idx": "gptq",
    ".qweight": "awq or gptq",
    ".weight_packed": "compressed-tensors, packed",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes, 4 bit",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes, 4 bit",
}
_MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def quantisation_of(raw: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """What config.json, or a file beside it, says of quantised weights; None = nothing."""
    facts = raw.get("quantization_config") or raw.get("compression_config")
    for name, method in _BESIDE.items():
        if not facts and (folder / name).exists():
            facts = {"quant_method": method} | read_json(folder / name)
    if not facts:
        return None
    nested = facts.get("quantization")  # modelopt
    facts = facts | nested if isinstance(nested, dict) else facts
    caches_only = facts.get("quant_method") == "modelopt" and facts.get("quant_algo") is None
    return None if caches_only else facts


def method_of(facts: dict[str, Any], where: str) -> str:
    """The quantisation that `facts` name; UserError if it is not one of those read here."""
    bits = {"load_in_4bit": "4 bit", "load_in_8bit": "8 bit"}
    in_bits = next((words for key, words in bits.items() if facts.get(key)), None)
    method = facts.get("quant_method") or ("bitsandbytes" if in_bits else "unknown")
    name, readable = method, method in ("fp8", "fbgemm_fp8", "mxfp4")
    if method == "compressed-tensors":
        name, groups = f"{method}, format {facts.get('format')}", facts.get("config_groups") or {}
        readable = facts.get("format") in ("float-quantized", "int-quantized", "naive-quantized")
        readable &= isinstance(groups, dict) and all(_eight_bits(group) for group in groups.values())
    if method == "bitsandbytes":
        name, readable = f"{method}, {in_bits}", in_bits == "8 bit"
    if method == "modelopt":
        name, readable = f"{method}, {facts.get('quant_algo')}", facts.get("quant_algo") == "FP8"
    if not readable:
        raise _unreadable(name, where)
    return method


def _unreadable(name: str, where: str) -> UserError:
    return UserError(f"weights quantised with {name!r} cannot be read / {where} / use an unquantised, FP8 or INT8 copy")


def _eight_bits(group: Any) -> bool:
    weights = group.get("weights") if isinstance(group, dict) else None
    return isinstance(weights, dict) and weights.get("num_bits") == 8


def dequantised(facts: dict[str, Any] | None, files: TensorFiles, where: str) -> Iterator[tuple]:
    """(name, array) of every tensor under the name it would have unquantised; experts in MXFP4 come one by one, as
    (name, array, expert). facts: of `quantisation_of`.

    Raises UserError for a quantisation that is not read.
    """
    if facts is None:
        for mark, name in _MARKS.items():
            if any(tensor.endswith(mark) for tensor in files):
                raise _unreadable(name, where)
    method = None if facts is None else method_of(facts, where)
    block = facts.get("weight_block_size") if method == "fp8" else None
    for name in files:
        if name.endswith("_blocks") and method == "mxfp4":
            yield from _mxfp4(name.removesuffix("_blocks"), files)
        elif method is None or not name.endswith(_COMPANIONS):
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
