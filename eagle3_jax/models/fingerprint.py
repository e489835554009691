"""Which target is this? Facts of the config, a sample of the weights, and a hash of the tokenizer.

fp32, bf16, int8 and GGUF copies of one model have different hashes but nearly equal samples, so they can be told apart
and still be compared. Another hidden size, vocabulary, block count or tokenizer is another target.
"""

import hashlib
import json
from typing import Any

import jax
import numpy as np

from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.weights import Params, flatten

_SAMPLES = 48


def target_fingerprint(config: DecoderConfig, params: Params, quantize: str | None = None) -> dict[str, Any]:
    """{facts, sample: 48 weights (4 digits) spread over all matrices, hash of those weights at their dtype, dtype}.

    quantize: of the target, which is then a fact and part of the hash as well.
    """
    flat = flatten(params)
    names = sorted(name for name, array in flat.items() if array.ndim == 2 and not name.endswith(".scale"))
    picks, scales = [], []
    for i in range(_SAMPLES):
        name = names[i * len(names) // _SAMPLES]
        rows, columns = flat[name].shape
        row, column = (i * 7919) % rows, (i * 104729) % columns
        scale = flat.get(f"{name.removesuffix('weight')}scale")  # of int8 codes
        picks.append(flat[name][row, column])
        scales.append(1.0 if scale is None else scale[row])
    values = np.asarray(jax.device_get(picks), np.float32) * np.asarray(jax.device_get(scales), np.float32)
    dtype = str(flat[names[0]].dtype)  # of the head or the embedding, which are never quantised
    return {
        **config.facts,
        "dtype": dtype,
        **({"quantize": quantize} if quantize else {}),
        "sample": [float(f"{v:.4g}") for v in values],
        "hash": hashlib.sha256(values.tobytes() + f"{dtype}{quantize or ''}".encode()).hexdigest()[:16],
    }


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """Hash of the vocabulary with its ids; None without a tokenizer."""
    if tokenizer is None:
        return None
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def differing_facts(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Shape facts on which two fingerprints differ, in words; empty when the targets are interchangeable in shape."""
    keys = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
    return [f"{key} {a[key]} against {b[key]}" for key in keys if key in a and key in b and a[key] != b[key]]


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """True for copies of one model in any precision (sample within 10 %, the error of 4-bit copies)."""
    if a.get("hash") == b.get("hash"):
        return True
    x, y = np.asarray(a.get("sample", [])), np.asarray(b.get("sample", []))
    return x.shape == y.shape and x.size > 0 and bool(np.linalg.norm(x - y) <= 0.1 * np.linalg.norm(x))
