"""A random target and a draft that is often right, so small that a server of them answers in milliseconds: the bigram
pair of the tests with a tokenizer made up for it."""

import itertools
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout need not be installed

import eagle3_jax as e3  # noqa: E402
from tests.tiny import bigram_draft, write_bigram_target  # noqa: E402

CONTEXT = 256
_VOCABULARY, _END = 512, 2
_TEMPLATE = (
    "{% for message in messages %}{{'<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def write_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """Writes `folder`/target and `folder`/draft, as Hugging Face and speculators do; returns them. tau is about 2."""
    sizes = {"max_position_embeddings": CONTEXT, "eos_token_id": _END}
    target = write_bigram_target(folder / "target", _VOCABULARY, context=0.3, **sizes)
    _tokenizer().save_pretrained(target)
    draft = bigram_draft(e3.load_target(target, dtype="float32"), noise=0.1, max_positions=CONTEXT)
    e3.save_draft(draft, folder / "draft")
    return target, folder / "draft"


def _tokenizer() -> PreTrainedTokenizerFast:
    """512 tokens: three special ones, every byte, and 253 pairs of letters."""
    special = ["<|start|>", "<|unused|>", "<|end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(itertools.product("etaoinshrdlucmfw", repeat=2))[: _VOCABULARY - len(special) - len(letters)]
    vocabulary = {token: i for i, token in enumerate([*special, *letters, *(a + b for a, b in pairs)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[_END], chat_template=_TEMPLATE)
