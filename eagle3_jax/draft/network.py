"""The EAGLE-3 draft network (paper section 3.1; spec section 0).

    u = fc(norm(taps))                        once per target feature, never on the draft's own output; norms optional
    o = u + Attention([norm(embedding), norm(u)])     embedding first
    y = o + MLP(norm(o))                      y is fed back as the next step's u (or norm(y) with norm_output)
    logits over the draft vocabulary = lm_head(norm(y))

Attribute names are the speculators checkpoint names. Further layers are ordinary decoder blocks. A draft without
auxiliary hidden states (`use_aux_hidden_state: false`) reads one tap, the last block's output, after the *target's*
final norm, as the servers that have such drafts feed it; it may have no fc.
"""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.draft.config import DraftConfig
from eagle3_jax.models.attention import Attend
from eagle3_jax.models.blocks import MLP, Attention, Block, Embedding, Linear, RMSNorm, rms_norm
from eagle3_jax.models.decoder import head_logits
from eagle3_jax.models.rope import rotary
from eagle3_jax.taps import Taps, fuse, require


class FirstLayer(nnx.Module):
    """The layer that joins the next token's embedding with the hidden state; its q/k/v read 2H."""

    def __init__(self, config: DraftConfig):
        size, eps = config.decoder.hidden_size, config.decoder.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config.decoder, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config.decoder)
        self.norm_before_residual = config.norm_before_residual

    def __call__(self, embeddings: Float[Array, "B T H"], hidden: Float[Array, "B T H"], angles, attend: Attend, cache):
        normed = self.hidden_norm(hidden)
        joined = jnp.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
        attended, cache = self.self_attn(joined, angles, attend, cache)
        x = (normed if self.norm_before_residual else hidden) + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class TargetNorm(nnx.Module):
    """The target's final norm, its weight and eps lent by the target when a draft is bound."""

    def __init__(self, size: int):
        self.weight = nnx.Param(jnp.ones((size,)))
        self.eps = nnx.Param(jnp.zeros(()))

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        return rms_norm(x, self.weight[...], self.eps[...])


class DraftModel(nnx.Module):
    """The whole draft. `embed_tokens` covers the target's vocabulary and is frozen in training."""

    def __init__(self, config: DraftConfig):
        decoder, width = config.decoder, config.target_hidden_size
        count, size, eps = len(config.taps), decoder.hidden_size, decoder.rms_norm_eps
        self.config = config
        self.embed_tokens = Embedding(decoder.vocab_size, size)
        self.fc = Linear(count * width, size, config.fc_bias) if config.has_fc else None
        self.target_norm = None if config.use_aux_hidden_state else TargetNorm(width)
        self.input_norm = RMSNorm(count * width, eps) if config.norm_before_fc else None
        self.fc_norm = nnx.List([RMSNorm(width, eps) for _ in range(count)]) if config.fc_norm else None
        self.layers = nnx.List([FirstLayer(config)] + [Block(decoder) for _ in range(decoder.num_layers - 1)])
        self.norm = RMSNorm(size, eps)
        self.lm_head = Linear(size, config.draft_vocab_size)

    def project(self, taps: Taps) -> Float[Array, "B T H"]:
        """Target features to the draft's hidden size: (norm and) fc over the fused taps."""
        require(taps.tap_set, self.config.taps)
        if self.target_norm is not None:
            taps = taps.map(self.target_norm)
        if self.fc_norm is not None:
            taps = Taps([norm(a) for norm, a in zip(self.fc_norm, taps.arrays, strict=True)], taps.tap_set)
        fused = fuse(taps, self.config.taps)
        fused = fused if self.input_norm is None else self.input_norm(fused)
        return fused if self.fc is None else self.fc(fused)

    def __call__(
        self,
        hidden: Float[Array, "B T H"],
        ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        caches,
    ):
        """One draft step: hidden of token t with the embedding of token t+1 at position t.

        caches: one a layer, whatever `attend` expects. Returns y [B, T, H], before the final norm, and the caches.
        """
        angles = rotary(self.config.decoder.rope, positions)
        x, first = self.layers[0](self.embed_tokens(ids), hidden, angles, self._windowed(attend, 0), caches[0])
        updated = [first]
        for layer, (block, cache) in enumerate(zip(self.layers[1:], caches[1:], strict=True), start=1):
            x, cache = block(x, angles, self._windowed(attend, layer), cache)
            updated.append(cache)
        return x, tuple(updated)

    def _windowed(self, attend: Attend, layer: int) -> Attend:
        window = self.config.decoder.window(layer)
        return attend if window is None else functools.partial(attend, window=window)

    def logits(self, y: Float[Array, "B T H"]) -> Float[Array, "B T Vd"]:
        """float32 logits over the draft vocabulary."""
        return head_logits(self.norm(y), self.lm_head.weight[...])

    def feedback(self, y: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """The hidden state of the next step."""
        return self.norm(y) if self.config.norm_output else y
