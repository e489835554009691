"""A target and an EAGLE-3 draft of a real model's shape with random bf16 weights, made on the device, for benchmarks.

`force_agreement` sets a few of the weights so that both always choose the same token. The product's own unchanged
rounds then accept every draft token: tau is known, and the speed-up is the most that a shape allows.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.draft.config import DraftConfig
from eagle3_jax.draft.draft import draft_graph
from eagle3_jax.models.config import DecoderConfig, decoder_config
from eagle3_jax.models.decoder import CausalLM
from eagle3_jax.models.weights import Graph, Params, abstract_params, insert
from eagle3_jax.speculate.round import Models, Weights
from eagle3_jax.taps import paper_taps

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("num_key_value_heads", "head_dim")
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
# sizes in the order of _SIZES, tied embeddings, rope, draft vocabulary
_SHAPES = {
    "llama-3.1-8b": ((128256, 4096, 14336, 32, 32, 8, 128), False, _LLAMA3 | {"factor": 8.0}, 32000),
    "llama-3.2-1b": ((128256, 2048, 8192, 16, 32, 8, 64), True, _LLAMA3 | {"factor": 32.0}, 32000),
    "tiny": ((512, 64, 96, 7, 4, 2, 16), False, _PLAIN_ROPE, 128),
    "tiny-tied": ((512, 64, 96, 7, 4, 2, 16), True, _PLAIN_ROPE, 128),
}
SHAPES = tuple(_SHAPES)

_STD = 0.02
_SHARED = 256.0  # what every embedding has in its first place; blocks add some tens there at most
_DRAFT_ID = 7  # the token on which both agree, as the draft numbers it


@dataclass(frozen=True)
class RandomPair:
    """The pair as `speculate` takes it. Bytes of weights that must be read: target_bytes by a forward pass of any
    number of rows, step_bytes by a draft step, fc_bytes once a round besides. Embeddings are looked up, not read."""

    config: DecoderConfig
    models: Models
    weights: Weights
    target_bytes: int
    step_bytes: int
    fc_bytes: int


def random_pair(name: str) -> RandomPair:
    """A pair of one of SHAPES: a draft of one block with the target's sizes, reading the paper's taps."""
    config, draft_vocabulary = shape_config(name), _SHAPES[name][-1]
    block = dataclasses.replace(config, num_layers=1, tie_embeddings=False)
    graph, shapes = target_shapes(config)
    draft, draft_shapes = draft_graph(
        DraftConfig(block, paper_taps(config.num_layers), draft_vocabulary, config.hidden_size)
    )
    d2t = jnp.arange(draft_vocabulary, dtype=jnp.int32) * (config.vocab_size // draft_vocabulary)
    params, draft_params = _random_params(shapes, 1), _random_params(draft_shapes, 2)
    force_agreement(params, draft_params, int(d2t[_DRAFT_ID]), _DRAFT_ID)
    looked_up = () if config.tie_embeddings else ("model.embed_tokens.weight",)
    return RandomPair(
        config,
        Models(graph, draft, paper_taps(config.num_layers)),
        Weights(params, draft_params, d2t),
        target_bytes=2 * parameter_count(shapes, looked_up),
        step_bytes=2 * parameter_count(draft_shapes, ("embed_tokens.weight", "fc.weight")),
        fc_bytes=2 * math.prod(draft_shapes["fc.weight"]),
    )


def shape_config(name: str) -> DecoderConfig:
    sizes, tied, rope, _ = _SHAPES[name]
    raw = dict(zip(_SIZES, sizes, strict=True)) | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
    return decoder_config(raw | {"tie_word_embeddings": tied, "rope_parameters": rope})


def target_shapes(config: DecoderConfig) -> tuple[Graph, dict[str, tuple[int, ...]]]:
    """The target's graph and {checkpoint name: shape}, nothing allocated."""
    return abstract_params(nnx.eval_shape(lambda: CausalLM(config)))


def parameter_count(shapes: dict[str, tuple[int, ...]], without: tuple[str, ...] = ()) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in without)


def force_agreement(target: Params, draft: Params, token: int, draft_id: int) -> None:
    """Sets weights in place so that the target always chooses `token` and the draft `draft_id`, whatever they read.

    All embeddings share a large first place, which no block outweighs, so it is large in every hidden state and tap;
    the first row of fc hands it to the draft, and only the rows of the two tokens in the heads look at it.
    """
    embedding = target["model"]["embed_tokens"]["weight"].at[:, 0].set(_SHARED)
    if "lm_head" in target:
        target["lm_head"]["weight"] = target["lm_head"]["weight"].at[token, 0].set(1.0)
    else:
        embedding = embedding.at[token, 0].set(2 * _SHARED)
    target["model"]["embed_tokens"]["weight"] = draft["embed_tokens"]["weight"] = embedding
    draft["fc"]["weight"] = draft["fc"]["weight"].at[0, 0].set(1.0)
    draft["lm_head"]["weight"] = draft["lm_head"]["weight"].at[draft_id, 0].set(1.0)


def _random_params(shapes: dict[str, tuple[int, ...]], seed: int) -> Params:
    """Norms one, everything else normal with a deviation of 0.02."""
    params: Params = {}
    for i, (name, shape) in enumerate(shapes.items()):
        key = jax.random.fold_in(jax.random.key(seed), i)
        insert(params, name, jnp.ones(shape, jnp.bfloat16) if "norm" in name else noise(key, shape, _STD))
    return params


@functools.partial(jax.jit, static_argnums=(1, 2))
def noise(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """bf16 normal numbers."""
    return std * jax.random.normal(key, shape, jnp.bfloat16)
