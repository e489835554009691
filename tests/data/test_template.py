"""The loss mask marks what the model generates, for several chat formats; training sees the ids that serving sees."""

from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eagle3_jax.data.records import Conversation, TokenRow
from eagle3_jax.data.template import prompt_ids, tokenise
from eagle3_jax.errors import UserError

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant\nroles') }}"
    "{% endif %}{% endfor %}"
)
# Like Qwen 3: an empty think block before the last answer only, thoughts dropped from earlier answers.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% if loop.last and '</think>' not in message['content'] %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like GLM 4: a turn is closed by the header of the next one.
HEADERS_ONLY = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
CORPUS = [
    "Hello, how are you? I am fine. The answer is 4 and the other answer is 6.",
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "system\nuser\nassistant\n\nWhat is two plus two? Let me think step by step. \n\n\n",
] * 3

GPT2_SPLIT = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
# Llama 3 keeps newlines together whatever follows; GPT-2's splitting does not.
LLAMA3_SPLIT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            behavior="isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


def build(template: str, special: list[str], split: object = GPT2_SPLIT, **names: str) -> PreTrainedTokenizerFast:
    """A small byte-level BPE tokenizer that adds BOS by itself if it has one, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos := names.get("bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names)


def smollm2(template: str = SMOLLM2) -> PreTrainedTokenizerFast:
    return build(template, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")


def llama3(split: object = LLAMA3_SPLIT) -> PreTrainedTokenizerFast:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    # As in a base model's config: the end-of-turn token is special but has no name.
    return build(LLAMA3, special, split, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")


def mistral() -> PreTrainedTokenizerFast:
    return build(MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], bos_token="<s>", eos_token="</s>")


FORMATS = {"smollm2": (smollm2, "<|im_end|>"), "llama3": (llama3, "<|eot_id|>"), "mistral": (mistral, "</s>")}


def chat(*contents: str, system: str | None = None) -> Conversation:
    """Alternating user and assistant turns, after an optional system turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return Conversation([{"role": "system", "content": system}] * (system is not None) + messages, 7, "rows.jsonl")


def supervised(tokenizer: PreTrainedTokenizerFast, record: Conversation) -> list[str]:
    """The decoded text of each run of supervised tokens."""
    ids, mask = tokenise(tokenizer, record, len(tokenizer))
    assert ids.dtype == np.int32 and mask.dtype == bool and ids.shape == mask.shape
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return [tokenizer.decode(ids[start:end]) for start, end in edges]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "contents",
    [
        ("Hello", "I am fine."),
        ("2 + 2?", "4", "3 + 3?", "6"),
        ("say it", "it", "say it again", "it"),  # answers that also occur in the user's turns
        ("Grüße", "日本語 🙂 ñ", "🙂", "🙂"),
        ("Hello", "", "again", "fine\n\nI am"),
        ("think", "<think>\nstep by step\n</think>\nThe answer is 6."),
        ("Hello", "I am fine.", "trailing question"),
        ("Hello",),
    ],
)
def test_supervised_are_the_answers_with_their_end_token(name: str, contents: tuple[str, ...]) -> None:
    make, end = FORMATS[name]
    space = " " if name == "mistral" else ""
    assert supervised(make(), chat(*contents)) == [space + answer + end for answer in contents[1::2]]


@pytest.mark.parametrize("name", ["smollm2", "llama3"])
def test_system_turns_and_consecutive_answers(name: str) -> None:
    make, end = FORMATS[name]
    assert supervised(make(), chat("Hello", "fine", system="You are helpful")) == ["fine" + end]
    record = chat("Hello", "fine", "x", "6")
    record.messages[2]["role"] = "assistant"
    assert supervised(make(), record) == ["fine" + end, "x" + end, "6" + end]


@pytest.mark.parametrize("name", FORMATS)
def test_ids_before_each_answer_are_those_a_server_sends(name: str) -> None:
    tokenizer = FORMATS[name][0]()
    record = chat("Grüße, how are you?", "I am 🙂.", "2 + 2?", "4", "x", "")
    ids, mask = tokenise(tokenizer, record, len(tokenizer))
    starts = np.flatnonzero(np.diff(mask, prepend=False).astype(bool) & mask)
    assert len(starts) == 3
    for turn, start in enumerate(starts):
        messages = record.messages[: 2 * turn + 1]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert prompt_ids(tokenizer, messages) == prompt == ids[:start].tolist()
    assert (ids == tokenizer.bos_token_id).sum() == (name != "smollm2")  # exactly one where the template writes one


def test_a_trimming_template_still_gives_the_answer() -> None:
    assert supervised(llama3(), chat("x", "  fine \n")) == ["fine<|eot_id|>"]


def test_outer_blanks_that_stay_separate_tokens_are_the_models() -> None:
    assert supervised(smollm2(), chat("x", " fine \n")) == [" fine \n<|im_end|>"]


def test_text_the_template_puts_before_an_answer_is_not_supervised() -> None:
    tokenizer = smollm2(THINKING)
    assert supervised(tokenizer, chat("x", "4", "y", "6")) == ["4<|im_end|>", "6<|im_end|>"]
    assert supervised(tokenizer, chat("x", "")) == ["<|im_end|>"]
    with_thoughts = "<think>\nstep\n</think>\n\n6"
    assert supervised(tokenizer, chat("x", with_thoughts)) == [with_thoughts + "<|im_end|>"]


def test_the_next_header_is_not_an_end_of_turn_token() -> None:
    tokenizer = build(HEADERS_ONLY, ["<|user|>", "<|assistant|>", "<|endoftext|>"], eos_token="<|endoftext|>")
    assert supervised(tokenizer, chat("x", "4", "y", "6")) == ["4", "6"]


def test_a_space_marker_tokenizer() -> None:
    """SentencePiece style: " answer" is one token that begins where the prompt ends."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], show_progress=False
    )
    tokenizer.train_from_iterator([" answer two plus"] * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=MISTRAL, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    ids, mask = tokenise(fast, chat("two", "answer", "plus", "two plus"), len(fast))
    assert fast.convert_ids_to_tokens(ids[mask]) == ["▁answer", "</s>", "▁two", "▁plus", "</s>"]


def qwen_history() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return smollm2(THINKING), chat("x", "<think>\nstep\n</think>\n\n4", "y", "6")


def rewritten_prefix() -> tuple[PreTrainedTokenizerFast, Conversation]:
    template = SMOLLM2.replace("messages %}", "messages %}{{ messages | length }}", 1)
    return smollm2(template), chat("x", "4")


def upper_case() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return smollm2(SMOLLM2.replace("message['content']", "message['content'] | upper")), chat("x", "fine")


def end_token_not_special() -> tuple[PreTrainedTokenizerFast, Conversation]:
    tokenizer = build(SMOLLM2, ["<|endoftext|>", "<|im_start|>"], eos_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=False)])
    return tokenizer, chat("x", "fine")


def header_merges_with_answer() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return smollm2(), chat("x", "\n\nfine")


def begins_with_answer() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return smollm2(), Conversation([{"role": "assistant", "content": "4"}], 7, "rows.jsonl")


def refusing_template() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return mistral(), chat("x", "4", system="You are helpful")


def no_template() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return smollm2(""), chat("x", "4")


def splits_by_what_follows() -> tuple[PreTrainedTokenizerFast, Conversation]:
    """GPT-2 makes "\n\n" one token at the end of a prompt and two before text; none of them crosses the border."""
    return llama3(GPT2_SPLIT), chat("x", "fine")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (qwen_history, "message 1: the chat template does not render the answer as it stands"),
        (rewritten_prefix, "message 1: the chat template rewrites history"),
        (upper_case, "does not render the answer"),
        (end_token_not_special, "no end-of-turn token after the answer .*is it marked special"),
        (header_merges_with_answer, "message 1: one token lies across the border"),
        (splits_by_what_follows, "message 1: the tokens before the answer differ"),
        (begins_with_answer, "begins with an assistant turn"),
        (refusing_template, "refuses the messages: Only user and assistant roles"),
        (no_template, "no chat template"),
    ],
)
def test_what_cannot_be_masked_rightly_is_refused(case: Callable, message: str) -> None:
    tokenizer, record = case()
    with pytest.raises(UserError, match=f"rows.jsonl:7.*{message}") as caught:
        tokenise(tokenizer, record, len(tokenizer))
    assert "\n" not in str(caught.value)


def test_token_rows_are_passed_through_and_checked() -> None:
    ids, mask = tokenise(None, TokenRow([3, 9, 0], [0, 1, 1], 4, "rows.jsonl"), 10)
    assert ids.dtype == np.int32 and mask.dtype == bool
    assert ids.tolist() == [3, 9, 0] and mask.tolist() == [False, True, True]
    for bad in (10, -1):
        with pytest.raises(UserError, match=f"rows.jsonl:4: token id {bad} at position 1 is outside 0..9"):
            tokenise(None, TokenRow([3, bad], [0, 1], 4, "rows.jsonl"), 10)


def test_a_tokenizer_larger_than_the_target_is_refused() -> None:
    with pytest.raises(UserError, match="outside 0..49; was it tokenised for another target"):
        tokenise(smollm2(), chat("x", "4"), 50)
