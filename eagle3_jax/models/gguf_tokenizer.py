"""The tokenizer inside a GGUF file, as a transformers tokenizer with its chat template (no torch).

transformers' own `gguf_file=` imports torch, so the tokenizer is put together with `tokenizers` here: a byte-level BPE
(`gpt2` in the file), or for Gemma a SentencePiece BPE (`llama` in the file), which has scores in place of merges.
"""

import os
from typing import TYPE_CHECKING

from eagle3_jax.errors import UserError
from eagle3_jax.models.gguf_header import Header, read_header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# tokenizer.ggml.pre -> pattern that splits the text before the merges, as in those models' tokenizer.json. The other
# two use GPT-2's pattern, which `ByteLevel` has built in; smollm first splits off every digit.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {"llama-bpe": _CONTRACTIONS + r"\p{N}{1,3}" + _REST, "qwen2": _CONTRACTIONS + r"\p{N}" + _REST}
_SUPPORTED = ("smollm", "gpt-2", *_PATTERNS)

# tokenizer.ggml.token_type values (llama.cpp's llama_token_type).
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece writes a space as this letter


def gguf_tokenizer(path: str | os.PathLike) -> "PreTrainedTokenizerFast":
    """Build the tokenizer of a GGUF file: vocabulary, merges, special tokens, and the chat template if there is one.

    Control tokens such as `<|im_start|>` are one id each, also inside ordinary text. UserError if the tokenizer is
    neither a byte-level BPE with a supported pre-tokenizer nor Gemma's: a wrong guess would tokenize nearly right.
    """
    from transformers import PreTrainedTokenizerFast

    header = read_header(path)
    meta = header.metadata
    tokens = _vocabulary(header)
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = meta.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            if not 0 <= index < len(tokens):
                raise UserError(
                    f"{header.path}: tokenizer.ggml.{key}_token_id {index} is outside the vocabulary of "
                    f"{len(tokens)}; convert the model again"
                )
            named[f"{name}_token"] = tokens[index]
    pieces = meta["tokenizer.ggml.model"] == "llama"
    context = f"{meta.get('general.architecture')}.context_length"
    return PreTrainedTokenizerFast(
        tokenizer_object=_sentencepiece_bpe(header, tokens) if pieces else _byte_level_bpe(header, tokens),
        chat_template=meta.get("tokenizer.chat_template"),
        # llama.cpp prepends bos for llama-bpe also when the key is absent.
        add_bos_token=meta.get("tokenizer.ggml.add_bos_token", meta.get("tokenizer.ggml.pre") == "llama-bpe"),
        add_eos_token=meta.get("tokenizer.ggml.add_eos_token", False),
        clean_up_tokenization_spaces=False,
        **({"model_max_length": meta[context]} if context in meta else {}),
        **named,
    )


def _vocabulary(header: Header) -> list[str]:
    model, pre = header.need("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")
    gemma = model == "llama" and str(header.metadata.get("general.architecture")).startswith("gemma")
    if not gemma and (model != "gpt2" or pre not in _SUPPORTED):
        raise UserError(
            f"{header.path}: GGUF tokenizer {model!r} with pre-tokenizer {pre!r} is not supported, only "
            f"'gpt2' with one of {', '.join(_SUPPORTED)} or Gemma's; use the Hugging Face folder"
        )
    tokens = header.need("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise UserError(f"{header.path}: tokenizer.ggml.tokens holds the same token twice; convert the model again")
    if len(header.need("tokenizer.ggml.token_type")) != len(tokens):
        raise UserError(f"{header.path}: tokenizer.ggml.token_type and .tokens differ in length; convert it again")
    return tokens


def _ids(header: Header, tokens: list[str]) -> dict[str, int]:
    """The id of each token. Rows of the embedding that have none are called [PAD7] (row 7) in a GGUF; the original
    tokenizer does not have these."""
    kinds = header.metadata["tokenizer.ggml.token_type"]
    numbered = enumerate(zip(tokens, kinds, strict=True))
    return {token: index for index, (token, kind) in numbered if kind != _UNUSED or token != f"[PAD{index}]"}


def _merges(header: Header, vocabulary: dict[str, int]) -> list[tuple[str, ...]]:
    # A byte-level token holds no space (it is written as another letter), so the one space separates the two halves.
    merges = [tuple(merge.split(" ")) for merge in header.need("tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise UserError(
                f"{header.path}: tokenizer.ggml.merges has {' '.join(merge)!r}, which the vocabulary does "
                "not hold; convert the model again"
            )
    return merges


def _byte_level_bpe(header: Header, tokens: list[str]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = header.metadata["tokenizer.ggml.pre"]
    vocabulary = _ids(header, tokens)
    # No unknown token: as in the originals, a byte the vocabulary lacks (SmolLM2: a few control characters) is dropped.
    merges = _merges(header, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre in _PATTERNS:
        split = [pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated")]
    else:
        split = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _PATTERNS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()

    return _with_added_tokens(tokenizer, header, tokens)


def _sentencepiece_bpe(header: Header, tokens: list[str]) -> "Tokenizer":
    """Gemma's: spaces are written as a letter, merges come in the order of the scores of what they make, and what the
    vocabulary lacks is spelled in bytes. User-defined pieces come before all others, as SentencePiece has it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores, kinds = header.need("tokenizer.ggml.scores"), header.metadata["tokenizer.ggml.token_type"]
    if len(scores) != len(tokens):
        raise UserError(f"{header.path}: tokenizer.ggml.scores and .tokens differ in length; convert it again")
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise UserError(f"{header.path}: tokenizer.ggml.add_space_prefix is not supported; use the Hugging Face folder")
    vocabulary = _ids(header, tokens)
    merges = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _BYTE) or token not in vocabulary:
            continue
        rank = 0.0 if kind == _USER_DEFINED else score
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in vocabulary and right in vocabulary:
                merges.append((-rank, -len(left), -len(right), vocabulary[left], vocabulary[right]))
    merges.sort()
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(tokens[left], tokens[right]) for *_, left, right in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_added_tokens(tokenizer, header, tokens)


def _with_added_tokens(tokenizer: "Tokenizer", header: Header, tokens: list[str]) -> "Tokenizer":
    from tokenizers import AddedToken

    kinds = list(zip(tokens, header.metadata["tokenizer.ggml.token_type"], strict=True))
    special = [AddedToken(token, special=True, normalized=False) for token, k in kinds if k in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED])
    return tokenizer
