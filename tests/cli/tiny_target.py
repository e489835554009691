"""The tiny random target with a character-level tokenizer and a chat template; files of prompts and answers."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import write_target

TEMPLATE = (
    "{% for message in messages %}{{'<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(alphabet: str = "abcdefghijklmnopqrstuvwxyz ?\n") -> PreTrainedTokenizerFast:
    """One token a byte-level character of `alphabet`; `<|start|>` is 0 and the end token `<|end|>` is 1."""
    letters = sorted({unit for unit, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(alphabet)})
    letters = sorted(set("".join(letters)))
    vocabulary = {token: i for i, token in enumerate(["<|start|>", "<|end|>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE)


def write_tiny_target(folder: Path) -> Path:
    """Writes config, weights and tokenizer; returns the folder."""
    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "max_position_embeddings": 256, "eos_token_id": 1}
    tokenizer.save_pretrained(write_target(folder, **sizes))
    return folder


def write_prompts(path: Path, prompts: list[list[str]]) -> Path:
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in prompts), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict]:
    """Rows of a file of answers in the order of their prompts."""
    return sorted(map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=lambda row: row["id"])
