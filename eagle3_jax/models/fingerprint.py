"""Which target is this? Facts of the config, a sample of the weights, and a hash of the tokenizer.

fp32, bf16 and GGUF copies of one model have different hashes but nearly equal samples, so they can be told apart and
still be compared. Another hidden size, vocabulary, block count or tokenizer is another target.
"""

import hashlib
import json
from typing import Any

import jax
import numpy as np

from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.weights import Params, flatten

_SAMPLES = 48


def target_fingerprint(config: DecoderConfig, params: Params) -> dict[str, Any]:
    """{facts, sample: 48 weights (4 digits) spread over all matrices, hash of those weights at their dtype, dtype}."""
    flat = sorted(flatten(params).items())
    matrices = [array for name, array in flat if array.ndim == 2]
    picks = []
    for i in range(_SAMPLES):
        matrix = matrices[i * len(matrices) // _SAMPLES]
        row, column = (i * 7919) % matrix.shape[0], (i * 104729) % matrix.shape[1]
        picks.append(matrix[row, column])
    values = np.asarray(jax.device_get(picks), np.float32)
    return {
        **config.facts,
        "dtype": str(matrices[0].dtype),
        "sample": [float(f"{v:.4g}") for v in values],
        "hash": hashlib.sha256(values.tobytes() + str(matrices[0].dtype).encode()).hexdigest()[:16],
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
