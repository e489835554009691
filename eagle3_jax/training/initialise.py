"""First weights of a draft: random, or grown from the target's last block."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import DraftShape
from eagle3_jax.draft.config import DraftConfig
from eagle3_jax.draft.draft import Draft, draft_graph, new_draft
from eagle3_jax.errors import UserError
from eagle3_jax.models import int8
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.rope import RopeConfig
from eagle3_jax.models.target import Target
from eagle3_jax.models.weights import Params, flatten, insert
from eagle3_jax.taps import TapSet, paper_taps


def draft_config(shape: DraftShape, target: Target) -> DraftConfig:
    """The draft's static facts for this target: its width, heads and rope; everything else from the config."""
    own = target.config
    head_dim, rope = _head(own)
    decoder = DecoderConfig(
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=shape.intermediate_size or own.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=own.rms_norm_eps,
        rope=rope,
        max_positions=own.max_positions,
    )
    taps = paper_taps(own.num_layers) if shape.taps == "paper" else TapSet(shape.taps)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return DraftConfig(
        decoder=decoder,
        taps=taps.check(own.num_layers),
        draft_vocab_size=min(shape.vocab_size, own.vocab_size),
        target_hidden_size=own.hidden_size,
        **{flag: getattr(shape, flag) for flag in flags},
    )


def _head(own: DecoderConfig) -> tuple[int, RopeConfig]:
    """Size and rotation of the draft's heads, which are plain attention whatever the target's are.

    The target's own, but for what servers' drafts do not have: latent attention gets heads of hidden / heads, a
    rotation of a part of a head becomes one of all of it, and LongRoPE, whose factors belong to the target's weights,
    a plain one.
    """
    head_dim = own.head_dim if own.latent is None else max(2 * (own.hidden_size // own.num_heads // 2), 2)
    if own.rope.kind == "longrope":
        return head_dim, RopeConfig(head_dim, own.rope.theta, "default", own.rope.max_positions)
    return head_dim, dataclasses.replace(own.rope, head_dim=head_dim)


def initial_draft(shape: DraftShape, target: Target, d2t: np.ndarray, seed: int, facts: dict) -> Draft:
    """A draft with float32 weights: norms 1, matrices normal(0, 1/sqrt(in)), final norm, head rows and embedding the
    target's.

    A target keeps its state small where its final norm's weight is large (Gemma 3 270M: 0.01 where it is 300). A random
    state is not, and makes a head of the target's rows sure of wrong tokens (a loss of 215 there, not 10). So the rows
    that write to the draft's state are divided by that weight, in units of its median.
    """
    config = draft_config(shape, target)
    _, shapes = draft_graph(config)
    key = jax.random.key(seed)
    weight = jnp.abs(target.final_norm)
    row_sizes = (jnp.median(weight) / jnp.maximum(weight, 0.01 * jnp.median(weight) + 1e-9))[:, None]
    params: Params = {}
    for i, (name, size) in enumerate(sorted(shapes.items())):
        if name in ("embed_tokens.weight", "lm_head.weight"):
            continue
        drawn = jax.random.normal(jax.random.fold_in(key, i), size) / math.sqrt(size[-1])
        value = jnp.ones(size) if len(size) == 1 else drawn  # every vector is a norm: new drafts have no bias
        if name.endswith(("fc.weight", "o_proj.weight", "down_proj.weight")):
            value = value * row_sizes
        insert(params, name, value)
    head = target.params.get("lm_head", target.params["model"]["embed_tokens"])["weight"]
    params["lm_head"] = {"weight": head[jnp.asarray(d2t)].astype(jnp.float32)}
    params["norm"]["weight"] = target.final_norm
    params["embed_tokens"] = {"weight": target.params["model"]["embed_tokens"]["weight"]}
    if shape.initialise == "last_block":
        _grow_from_last_block(params, config, target, shape.last_tap_scale)
    return new_draft(config, params, d2t, facts)


def _grow_from_last_block(params: Params, config: DraftConfig, target: Target, last_tap_scale: float) -> None:
    """Every draft layer becomes the target's last block; fc passes the last tap through, times `last_tap_scale`.

    In the first layer, whose q/k/v read [embedding, hidden], the hidden half is the block's and the embedding half
    starts small and random.
    """
    block, size = int8.dense(target.params["model"]["layers"][target.num_layers - 1]), config.decoder.hidden_size
    wanted = {name: array.shape for name, array in flatten(params["layers"][0]).items() if name != "hidden_norm.weight"}
    for name in (f"self_attn.{p}_proj.weight" for p in "qkv"):
        wanted[name] = (wanted[name][0], size)  # the hidden half
    if {name: array.shape for name, array in flatten(block).items()} != wanted or target.config.norm_offset:
        raise UserError(
            "draft.initialise: last_block needs a target whose blocks are those of a draft (Llama's, without biases) "
            "and the target's own intermediate_size / set draft.initialise: random"
        )
    for layer in range(config.decoder.num_layers):
        own = params["layers"][layer]
        for name, value in flatten(block).items():
            value = value.astype(jnp.float32)
            if layer == 0 and name in {f"self_attn.{p}_proj.weight" for p in "qkv"}:
                drawn = params["layers"][0]["self_attn"][name.split(".")[1]]["weight"][:, :size]
                value = jnp.concatenate([0.1 * drawn, value], axis=1)
            insert(own, name, value)
    params["layers"][0]["hidden_norm"]["weight"] = block["input_layernorm"]["weight"].astype(jnp.float32)
    params["layers"][0]["input_layernorm"]["weight"] = jnp.ones(size)
    taps = len(config.taps)
    fc = params["fc"]["weight"] * 0.1
    params["fc"]["weight"] = fc.at[:, (taps - 1) * size :].set(last_tap_scale * jnp.eye(size))
