"""A target and a draft so small that a server of them answers in milliseconds: the repository's golden pair, whose
draft is often right, with a tokenizer made up for it."""

import itertools
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
_TEMPLATE = (
    "{% for message in messages %}{{'<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def write_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """Writes `folder`/target and `folder`/draft, as Hugging Face and speculators do; returns them. Context: 128."""
    target, draft = folder / "target", folder / "draft"
    for source, copy in ((_GOLDEN / "targets" / "llama_gqa", target), (_GOLDEN / "drafts" / "base", draft)):
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("expected.safetensors"))
    tokenizer().save_pretrained(target)
    return target, draft


def tokenizer() -> PreTrainedTokenizerFast:
    """512 tokens: three special ones (2 ends a text), every byte, and 253 pairs of letters."""
    special = ["<|start|>", "<|unused|>", "<|end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(itertools.product("etaoinshrdlucmfw", repeat=2))[: 512 - len(special) - len(letters)]
    vocabulary = {token: i for i, token in enumerate([*special, *letters, *(a + b for a, b in pairs)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", chat_template=_TEMPLATE)
