"""The Llama family: a stack of pre-norm blocks with a tap at every block input."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.models.attention import KV, Attend
from eagle3_jax.models.blocks import Block, Embedding, Linear, RMSNorm
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.rope import rotary
from eagle3_jax.taps import LastHidden, Taps, TapSet


class Decoder(nnx.Module):
    """Embedding, blocks and final norm: the `model.` part of a checkpoint."""

    def __init__(self, config: DecoderConfig):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([Block(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LlamaForCausalLM(nnx.Module):
    """A causal LM. Calling it returns the residual stream; `logits` turns hidden states into logits."""

    def __init__(self, config: DecoderConfig):
        self.model = Decoder(config)
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
        angles = rotary(self.config.rope, positions, lengths)
        x = self.model.embed_tokens(ids)
        stream, updated = [x], []
        for layer, block in enumerate(self.model.layers):
            x, cache = block(x, angles, attend, None if caches is None else caches[layer])
            stream.append(x)
            updated.append(cache)
        tapped = None if taps is None else Taps([stream[p] for p in taps.check(self.config.num_layers)], taps)
        return LastHidden(x, normed=False), tapped, None if caches is None else tuple(updated)

    def logits(self, last: LastHidden) -> Float[Array, "*rows V"]:
        """Final norm and head: float32 logits over the full vocabulary."""
        return head_logits(self.model.norm(last.before_norm()), self.head_weight)

    @property
    def head_weight(self) -> Float[Array, "V H"]:
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight[...]


def head_logits(normed: Float[Array, "*rows H"], weight: Float[Array, "V H"]) -> Float[Array, "*rows V"]:
    """float32 logits from normed hidden states and head rows (full vocabulary or a draft vocabulary's rows)."""
    return jnp.einsum("...h,vh->...v", normed, weight, preferred_element_type=jnp.float32)
