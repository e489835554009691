"""Small models for tests: a random Llama target written as a Hugging Face folder, and a random draft that fits it.

Eight blocks, so that taps [2, 4, 6] are apart; heads * head_dim != hidden, grouped queries and norms far from one, so
that a mixed-up dimension or a forgotten norm changes numbers.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from eagle3_jax.draft.config import DraftConfig
from eagle3_jax.draft.draft import Draft, draft_graph, new_draft
from eagle3_jax.models.config import decoder_config
from eagle3_jax.models.decoder import CausalLM
from eagle3_jax.models.target import Target
from eagle3_jax.models.weights import abstract_params, insert
from eagle3_jax.taps import TapSet

TAPS = (2, 4, 6)
SCATTERED = np.arange(0, 512, 4)  # the draft vocabulary: every fourth target id


def target_config(**changes: Any) -> dict[str, Any]:
    """A config.json dictionary; changes replace or add keys."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "eos_token_id": 2,
    } | changes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """float32 weights by checkpoint name: norms around one, embeddings 0.3, everything else 0.1."""
    rng = np.random.default_rng(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape)
        if "norm" in name:
            noise = 1 + 0.3 * noise
        else:
            noise *= 0.3 if "embed_tokens" in name else 0.1
        return noise.astype(np.float32)

    return {name: tensor(name, shape) for name, shape in sorted(shapes.items())}


def target_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    _, shapes = abstract_params(nnx.eval_shape(lambda: CausalLM(decoder_config(config))))
    return random_tensors(shapes, seed)


def write_target(folder: Path, seed: int = 0, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """Writes config.json and model.safetensors of a random target and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = target_config(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(target_tensors(config, seed) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def random_draft(
    target: Target, taps=TAPS, d2t=SCATTERED, seed: int = 1, layers: int = 1, layer: dict | None = None, **flags: bool
) -> Draft:
    """An untrained draft for `target` in memory, embedding included; layer: changes of its decoder's config, flags:
    options of DraftConfig."""
    raw = target_config(num_hidden_layers=layers, num_key_value_heads=1, head_dim=16) | (layer or {})
    decoder = decoder_config(raw | {"vocab_size": target.config.vocab_size})
    config = DraftConfig(decoder, TapSet(taps), len(d2t), target.config.hidden_size, **flags)
    _, shapes = draft_graph(config)
    facts = {"target": {"fingerprint": target.fingerprint}}
    return new_draft(config, _tree(random_tensors(shapes, seed)), np.asarray(d2t), facts)


def with_fc(draft: Draft, weight: np.ndarray) -> Draft:
    """The same draft with another fc weight, [H, A*H]."""
    return draft.with_params({**draft.params, "fc": {"weight": jnp.asarray(weight, jnp.float32)}})


def not_a_number(draft: Draft) -> Draft:
    """The same draft with every weight NaN."""
    return draft.with_params(jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), draft.params))


def ids_of(seed: int, *shape: int, vocab_size: int = 512) -> np.ndarray:
    """Random token ids, int32."""
    return np.random.default_rng(seed).integers(3, vocab_size, shape).astype(np.int32)


def relative(got, expected) -> float:
    """Norm of the difference over the norm of the reference."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))


def bigram_target(vocab_size: int = 8, context: float = 0.0, seed: int = 0, **changes: Any) -> Target:
    """A target in memory, one block of hidden size 16, whose next token depends on the current one.

    context: scale of what the blocks add to the residual stream; 0 makes it a pure bigram model.
    """
    raw, tensors = _bigram(vocab_size, context, seed, **changes)
    config = decoder_config(raw)
    graph, _ = abstract_params(nnx.eval_shape(lambda: CausalLM(config)))
    return Target("in memory", config, graph, _tree(tensors), None, (), None)


def write_bigram_target(folder: Path, vocab_size: int, context: float, seed: int = 0, **changes: Any) -> Path:
    """The same as `bigram_target` as a Hugging Face folder, without a tokenizer."""
    raw, tensors = _bigram(vocab_size, context, seed, **changes)
    return write_target(folder, tensors=tensors, **raw)


def _bigram(vocab_size: int, context: float, seed: int, **changes: Any) -> tuple[dict, dict[str, np.ndarray]]:
    raw = target_config(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 16,
        }
        | {"num_key_value_heads": 1, "intermediate_size": 32}
        | changes
    )
    tensors = target_tensors(raw, seed)
    rng = np.random.default_rng(seed)
    for name, array in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            array *= context
        elif "norm" in name:
            array[:] = 1
        elif name == "lm_head.weight":
            array[:] = 0.4 * rng.standard_normal(array.shape)
    return raw, tensors


def bigram_draft(target: Target, noise: float = 0.0, d2t=None, max_positions: int = 128, seed: int = 5) -> Draft:
    """A draft that knows the bigrams of a `bigram_target`: exactly at noise 0, ever worse with more.

    Each slot attends to itself alone (constant queries and keys, which the rotation turns away from each other), the
    values are the embedding of the next token, and the fed-back hidden state is multiplied by zero.
    """
    size, vocab = target.config.hidden_size, target.config.vocab_size
    d2t = np.arange(vocab) if d2t is None else np.asarray(d2t)
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": size}
    raw = target_config(
        vocab_size=vocab,
        hidden_size=size,
        intermediate_size=8,
        attention_bias=True,
        max_position_embeddings=max_positions,
        **heads,
    )
    taps = TapSet(range(target.num_layers + 1))
    config = DraftConfig(decoder_config(raw), taps, len(d2t), size, norm_before_residual=True)
    _, shapes = draft_graph(config)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"layers.0.{name}.weight"][:] = 1
    tensors["norm.weight"][:] = 1
    for name in ("q_proj", "k_proj"):
        tensors[f"layers.0.self_attn.{name}.bias"][:] = 8
    tensors["layers.0.self_attn.v_proj.weight"][:, :size] = np.eye(size)
    tensors["layers.0.self_attn.o_proj.weight"][:] = np.eye(size)
    tensors["embed_tokens.weight"][:] = target.params["model"]["embed_tokens"]["weight"]
    head = np.asarray(target.params["lm_head"]["weight"])[d2t]
    tensors["lm_head.weight"] = head + noise * np.random.default_rng(seed).standard_normal(head.shape).astype("f4")
    return new_draft(config, _tree(tensors), d2t, {})


def _tree(tensors: dict[str, np.ndarray]) -> dict:
    params: dict = {}
    for name, array in tensors.items():
        insert(params, name, jnp.asarray(array))
    return params
