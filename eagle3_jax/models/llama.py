"""Former place of the decoder, for code that still looks for it here."""

from eagle3_jax.models.decoder import CausalLM as LlamaForCausalLM
from eagle3_jax.models.decoder import head_logits

__all__ = ["LlamaForCausalLM", "head_logits"]
