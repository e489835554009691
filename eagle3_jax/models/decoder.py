"""The decoder of every family: embedding, a stack of blocks with a tap at every block input, final norm and head."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.models.attention import KV, Attend
from eagle3_jax.models.blocks import Block, Embedding, Linear, block_norm
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.rope import RopeConfig, rotary
from eagle3_jax.taps import LastHidden, Taps, TapSet

MakeBlock = Callable[[DecoderConfig, int], nnx.Module]  # the block of a layer


class Decoder(nnx.Module):
    """Embedding, blocks and final norm: the `model.` part of a checkpoint."""

    def __init__(self, config: DecoderConfig, block: MakeBlock):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([block(config, layer) for layer in range(config.num_layers)])
        self.norm = block_norm(config)


def plain_block(config: DecoderConfig, layer: int) -> Block:
    """The block of Llama and of all that differ from it by options of the config only."""
    return Block(config)


class CausalLM(nnx.Module):
    """A causal LM. Calling it returns the residual stream; `logits` turns hidden states into logits."""

    def __init__(self, config: DecoderConfig, block: MakeBlock = plain_block):
        self.model = Decoder(config, block)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        caches: tuple[KV, ...] | None = None,
        taps: TapSet | None = None,
        lengths: Int[Array, "B T"] | None = None,
    ) -> tuple[LastHidden, Taps | None, tuple[KV, ...] | None]:
        """Runs all blocks over ids [B, T].

        attend: how a block attends (`attention.causal` or `attention.cached`); lengths: see `rope.rotary`.
        Returns the last hidden state before the final norm, the requested taps and the updated caches.
        """
        config = self.config
        ropes = dict.fromkeys(config.layer_rope(layer) for layer in range(config.num_layers))
        angles = {rope: None if rope is None else rotary(rope, positions, lengths) for rope in ropes}
        x = self.embed(ids)

        # Inlined, so that the program is that of blocks called one by one; but alike ones are traced once.
        @functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
        def run(rope: RopeConfig | None, window: int | None, block: nnx.Module, x: Array, cache: Any):
            look = attend if window is None else functools.partial(attend, window=window)
            return block(x, angles[rope], look, cache)

        stream, updated = [x], []
        for layer, block in enumerate(self.model.layers):
            cache = None if caches is None else caches[layer]
            x, cache = run(config.layer_rope(layer), config.window(layer), block, x, cache)
            stream.append(x)
            updated.append(cache)
        tapped = None if taps is None else Taps([stream[p] for p in taps.check(config.num_layers)], taps)
        return LastHidden(x, normed=False), tapped, None if caches is None else tuple(updated)

    def embed(self, ids: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """Tap 0: what the first block reads, in Gemma the embedding times a constant."""
        x = self.model.embed_tokens(ids)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    def logits(self, last: LastHidden) -> Float[Array, "*rows V"]:
        """Final norm and head: float32 logits over the full vocabulary."""
        return self.normed_logits(self.model.norm(last.before_norm()))

    def normed_logits(self, normed: Float[Array, "*rows H"]) -> Float[Array, "*rows V"]:
        """float32 logits of hidden states after the final norm."""
        return head_logits(normed, self.head_weight, self.config.logit_softcap)

    @property
    def head_weight(self) -> Float[Array, "V H"]:
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight[...]


def head_logits(
    normed: Float[Array, "*rows H"], weight: Float[Array, "V H"], cap: float | None = None
) -> Float[Array, "*rows V"]:
    """float32 logits from normed hidden states and head rows (full vocabulary or a draft vocabulary's rows).

    cap: Gemma's limit c, c tanh(x / c) in place of a logit x.
    """
    logits = jnp.einsum("...h,vh->...v", normed, weight, preferred_element_type=jnp.float32)
    return logits if cap is None else cap * jnp.tanh(logits / cap)
