"""The loss mask marks what the model generates, for several chat formats; training sees the ids that serving sees."""

import datetime
import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eagle3_jax.data.records import Conversation, TextRow, TokenRow
from eagle3_jax.data.template import DEFAULT, ChatOptions, prompt_ids, tokenise
from eagle3_jax.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
SMOLLM2, LLAMA3 = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("smollm2", "llama3.1"))
# Like GLM 4: a turn is closed by the header of the next one.
HEADERS_ONLY = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Like gpt-oss: channels within an answer, another end in history than at the end, thoughts in the newest answer only.
CHANNELS = (
    "{% for message in messages %}{{ '<|start|>' + message.role }}{% if message.role == 'assistant' %}"
    "{% if loop.last and message.thinking %}{{ '<|channel|>analysis<|message|>' + message.thinking }}"
    "{{ '<|end|><|start|>assistant' }}{% endif %}{{ '<|channel|>final' }}{% endif %}"
    "{{ '<|message|>' + message.content }}"
    "{{ '<|return|>' if loop.last and message.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
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


def named(name: str, special: list[str], split: object = GPT2_SPLIT, plain: tuple[str, ...] = (), **names: str):
    """`name()` is a tokenizer with the template of that name; `plain` are added tokens that are not special."""

    @functools.cache
    def make() -> PreTrainedTokenizerFast:
        tokenizer = build((TEMPLATES / f"{name}.jinja").read_text(), special, split, **names)
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
        return tokenizer

    return make


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = {"eos_token": "<|im_end|>"}
PHI = {"eos_token": "<|endoftext|>"}
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}  # <|eot_id|> is special without a name
# Of each family: its tokenizer, the end-of-turn token, what the model writes first, and whether it has system prompts.
FORMATS = {
    "chatml": (named("chatml", CHATML, **QWEN), "<|im_end|>", "", True),
    "smollm2": (named("smollm2", CHATML, **QWEN), "<|im_end|>", "", True),
    "qwen2.5": (named("qwen2.5", CHATML, plain=("<tool_call>", "</tool_call>"), **QWEN), "<|im_end|>", "", True),
    "qwen3": (
        named("qwen3", CHATML, LLAMA3_SPLIT, plain=("<tool_call>", "</tool_call>", "<think>", "</think>"), **QWEN),
        "<|im_end|>",
        "",
        True,
    ),
    "llama3": (named("llama3.1", LLAMA, LLAMA3_SPLIT, **LLAMA_NAMES), "<|eot_id|>", "", True),
    "mistral": (
        named("mistral", ["<s>", "</s>", "[INST]", "[/INST]"], bos_token="<s>", eos_token="</s>"),
        "</s>",
        " ",
        True,
    ),
    "gemma": (
        named("gemma", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], bos_token="<bos>", eos_token="<eos>"),
        "<end_of_turn>",
        "",
        False,
    ),
    "phi3": (
        named(
            "phi3", ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], eos_token="<|endoftext|>"
        ),
        "<|end|>",
        "",
        True,
    ),
}
smollm2, qwen3, mistral, gemma = (FORMATS[name][0] for name in ("smollm2", "qwen3", "mistral", "gemma"))


def smollm2_with(template: str) -> PreTrainedTokenizerFast:
    return build(template, CHATML, **QWEN)


def llama3(split: object = LLAMA3_SPLIT) -> PreTrainedTokenizerFast:
    return FORMATS["llama3"][0]() if split is LLAMA3_SPLIT else build(LLAMA3, LLAMA, split, **LLAMA_NAMES)


def chat(*contents: str, system: str | None = None) -> Conversation:
    """Alternating user and assistant turns, after an optional system turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return Conversation([{"role": "system", "content": system}] * (system is not None) + messages, 7, "rows.jsonl")


def runs(tokenizer: PreTrainedTokenizerFast, record, options: ChatOptions = DEFAULT) -> list[tuple[list, str]]:
    """Of each run of supervised tokens in all documents: the ids before it, and its text."""
    found = []
    for ids, mask in tokenise(tokenizer, record, len(tokenizer), options):
        assert ids.dtype == np.int32 and mask.dtype == bool and ids.shape == mask.shape
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        found += [(ids[:start].tolist(), tokenizer.decode(ids[start:end])) for start, end in edges]
    return found


def supervised(tokenizer: PreTrainedTokenizerFast, record, options: ChatOptions = DEFAULT) -> list[str]:
    """The decoded text of each run of supervised tokens."""
    return [text for _, text in runs(tokenizer, record, options)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "contents",
    [
        ("Hello", "I am fine."),
        ("2 + 2?", "4", "3 + 3?", "e"),
        ("say it", "it", "say it again", "it"),  # answers that also occur in the user's turns
        ("Grüße", "日本語 🙂 ñ", "🙂", "🙂"),
        ("Hello", "", "again", "fine\n\nI am"),
        ("think", "<think>\nstep by step\n</think>\n\nThe answer is 6."),
        ("Hello", "I am fine.", "trailing question"),
        ("Hello",),
    ],
)
def test_supervised_are_the_answers_with_their_end_token(name: str, contents: tuple[str, ...]) -> None:
    make, end, space, _ = FORMATS[name]
    assert supervised(make(), chat(*contents)) == [space + answer + end for answer in contents[1::2]]


@pytest.mark.parametrize(
    ("name", "system"),
    [(name, None) for name in FORMATS]
    + [(name, "You are helpful") for name, (_, _, _, has_system) in FORMATS.items() if has_system],
)
def test_ids_before_each_answer_are_those_a_server_sends(name: str, system: str | None) -> None:
    make, _, _, _ = FORMATS[name]
    tokenizer, without = make(), ChatOptions(template={"enable_thinking": False})
    record = chat("Grüße, how are you?", "I am 🙂.", "2 + 2?", "4", "x", "", system=system)
    found = runs(tokenizer, record, without)
    assert len(found) == 3
    for turn, (ids, _) in enumerate(found):
        messages = record.messages[: 2 * turn + 1 + (system is not None)]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        assert prompt_ids(tokenizer, messages, template=without.template) == prompt == ids
        assert ids.count(tokenizer.bos_token_id) == (name in ("llama3", "mistral", "gemma"))


def test_thoughts_that_history_drops_are_kept_where_they_were_generated() -> None:
    """Qwen 3 drops the thoughts of earlier answers: each turn with some gets a document that ends with it."""
    tokenizer = qwen3()
    thought = "<think>\nstep\n</think>\n\n"
    inline = chat("x", thought + "4", "y", thought + "6")
    apart = chat("x", "4", "y", "6")
    for i in (1, 3):
        apart.messages[i]["reasoning_content"] = "step"
    for record in (inline, apart):
        documents = tokenise(tokenizer, record, len(tokenizer))
        assert len(documents) == 2
        found = runs(tokenizer, record)
        assert [text for _, text in found] == [thought + "4<|im_end|>", thought + "6<|im_end|>"]
        for (ids, _), count in zip(found, (1, 3), strict=True):
            prompt = tokenizer.apply_chat_template(
                record.messages[:count], add_generation_prompt=True, return_dict=False
            )
            assert ids == prompt
    loose = chat("x", "<think>step</think>\n4")  # other blanks around the tags than the template's
    assert supervised(tokenizer, loose) == [thought + "4<|im_end|>"]


def test_an_answer_without_thoughts_gets_no_tags_supervised() -> None:
    """The empty tags are the template's, in the generation prompt (`enable_thinking: false`) or before the answer."""
    thinks, off = qwen3(), ChatOptions(template={"enable_thinking": False})
    assert supervised(thinks, chat("x", "4", "y", "6")) == ["4<|im_end|>", "6<|im_end|>"]
    assert supervised(thinks, chat("x", "4", "y", "6"), off) == ["4<|im_end|>", "6<|im_end|>"]
    assert len(tokenise(thinks, chat("x", "4", "y", "6"), len(thinks), off)) == 2
    assert supervised(thinks, chat("x", "")) == ["<|im_end|>"]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3"])
def test_tool_calls_are_what_the_model_generated(name: str) -> None:
    tokenizer, end = FORMATS[name][0](), FORMATS[name][1]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    record = chat("2 + 2?", "", "ok", "4")
    record.messages[1]["tool_calls"], record.messages[2]["role"] = [call], "tool"
    record = Conversation(record.messages, 1, tools=[{"type": "function", "function": {"name": "add"}}])
    found = supervised(tokenizer, record)
    assert len(found) == 2 and found[1] == "4" + end and found[0].endswith(end)
    assert json.loads(found[0][found[0].index("{") : found[0].rindex("}") + 1])["name"] == "add"
    first = runs(tokenizer, record)[0][0]
    assert first == prompt_ids(tokenizer, record.messages[:1], tools=record.tools)
    assert ("<tools>" in tokenizer.decode(first)) == (name == "qwen2.5")


@pytest.mark.parametrize("name", ["chatml", "smollm2", "phi3"])
def test_tool_calls_that_a_template_leaves_out_are_refused(name: str) -> None:
    """Else an empty answer would be trained on."""
    tokenizer, record = FORMATS[name][0](), chat("2 + 2?", "Let me see", "ok", "4")
    record.messages[1]["tool_calls"] = [{"function": {"name": "add", "arguments": {"a": 2}}}]
    with pytest.raises(UserError, match="message 1: the chat template leaves out tool calls"):
        tokenise(tokenizer, record, len(tokenizer))


def test_an_answer_ends_at_its_first_end_token() -> None:
    """Answers that were decoded with their special tokens."""
    assert supervised(smollm2(), chat("x", "4<|im_end|>", "y", "6")) == ["4<|im_end|>", "6<|im_end|>"]
    assert supervised(mistral(), chat("x", "4</s>")) == [" 4</s>"]


def test_a_developers_prompt_is_the_system_prompt_of_templates_that_do_not_know_it() -> None:
    record = chat("Be kind", "4", "y", "6")
    for message, role in zip(record.messages, ("developer", "user", "assistant", "user"), strict=True):
        message["role"] = role
    ids = [tokenise(smollm2(), record, len(smollm2()))[0][0].tolist()]
    record.messages[0]["role"] = "system"
    assert ids == [tokenise(smollm2(), record, len(smollm2()))[0][0].tolist()]


def test_a_template_that_rewrites_what_came_before_gets_a_document_a_turn() -> None:
    """Each is the prompt that a server sends, then the answer."""
    tokenizer = smollm2_with("{{ messages | length }}" + SMOLLM2)
    record = chat("x", "4", "y", "6")
    for turn, (ids, text) in enumerate(runs(tokenizer, record)):
        assert ids == prompt_ids(tokenizer, record.messages[: 2 * turn + 1]) and text == "46"[turn] + "<|im_end|>"


def test_only_the_last_turn_on_request() -> None:
    last = ChatOptions(last_turn_only=True)
    assert supervised(smollm2(), chat("x", "4", "y", "6"), last) == ["6<|im_end|>"]
    assert supervised(mistral(), chat("x", "4", "y", "6", "z"), last) == [" 6</s>"]


def test_consecutive_answers() -> None:
    record = chat("Hello", "fine", "x", "6")
    record.messages[2]["role"] = "assistant"
    assert supervised(smollm2(), record) == ["fine<|im_end|>", "x<|im_end|>", "6<|im_end|>"]


def test_a_trimming_template_still_gives_the_answer() -> None:
    assert supervised(llama3(), chat("x", "  fine \n")) == ["fine<|eot_id|>"]


def test_outer_blanks_that_stay_separate_tokens_are_the_models() -> None:
    assert supervised(smollm2(), chat("x", " fine \n")) == [" fine \n<|im_end|>"]


@pytest.mark.parametrize("name", FORMATS)
def test_rendered_text_is_marked_as_its_conversation(name: str) -> None:
    tokenizer = FORMATS[name][0]()
    record = chat("Grüße", "I am 🙂.", "2 + 2?", "4", "x", "")
    text = tokenizer.apply_chat_template(record.messages, tokenize=False)
    row = TextRow(text, 3, "rows.jsonl")
    assert supervised(tokenizer, row) == supervised(tokenizer, record)
    assert supervised(tokenizer, row, ChatOptions(last_turn_only=True)) == supervised(tokenizer, record)[-1:]


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n", ["hello<|im_end|>"]),
        ("<|im_start|>assistant\n<think>\nstep\n</think>\n6", ["<think>\nstep\n</think>\n6"]),  # cut
        ("<|im_start|>assistant\n<think></think>It is 4.<|im_end|>", ["It is 4.<|im_end|>"]),
        ("<|im_start|>user\r\nhi<|im_end|>\r\n<|im_start|>assistant\r\nhello<|im_end|>\r\n", []),
        ("<|im_start|>assistanthello<|im_end|>", []),
        ("[INST] hi [/INST] hello</s>", []),
        ("", []),
    ],
)
def test_text_is_supervised_where_the_template_s_header_stands(text: str, answers: list[str]) -> None:
    assert supervised(FORMATS["chatml"][0](), TextRow(text, 1)) == answers


def test_text_without_the_first_token_of_every_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="does not begin with '<s>'"):
        tokenise(mistral(), TextRow("[INST] hi [/INST] hello</s>", 1), 500)


def test_the_next_header_is_not_an_end_of_turn_token() -> None:
    tokenizer = build(HEADERS_ONLY, ["<|user|>", "<|assistant|>", "<|endoftext|>"], eos_token="<|endoftext|>")
    assert supervised(tokenizer, chat("x", "4", "y", "6")) == ["4", "6"]


def test_channels_within_an_answer() -> None:
    special = ["<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>"]
    tokenizer, record = build(CHANNELS, special, eos_token="<|return|>"), chat("x", "4", "y", "final")
    assert supervised(tokenizer, record) == ["4", "final<|return|>"]
    text = TextRow(tokenizer.apply_chat_template(record.messages, tokenize=False), 1)
    final = "<|channel|>final<|message|>"
    assert supervised(tokenizer, text) == [f"{final}4", f"{final}final<|return|>"]
    for i in (1, 3):
        record.messages[i]["reasoning"] = "step"
    thought = "<|channel|>analysis<|message|>step<|end|>"
    answers = [f"{thought}<|start|>assistant{final}{answer}<|return|>" for answer in ("4", "final")]
    assert supervised(tokenizer, record) == answers
    text = TextRow(tokenizer.apply_chat_template(record.messages[:2], tokenize=False), 1)
    assert supervised(tokenizer, text) == [thought.removesuffix("<|end|>"), f"{final}4<|return|>"]


def test_text_of_a_template_whose_answers_begin_with_thoughts() -> None:
    tokenizer = smollm2_with(SMOLLM2.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n"))
    for thought, answer in (("", "6<|im_end|>"), ("step", "step\n</think>\n\n6<|im_end|>")):
        text = f"<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<think>\n{thought}\n</think>\n\n6<|im_end|>\n"
        assert supervised(tokenizer, TextRow(text, 1)) == [answer]


def test_an_answer_in_text_ends_where_the_next_turn_begins() -> None:
    tokenizer = build(HEADERS_ONLY, ["<|user|>", "<|assistant|>", "<|endoftext|>"], eos_token="<|endoftext|>")
    text = "<|user|>\nx<|assistant|>\n4<|user|>\ny<|assistant|>\n6"
    assert supervised(tokenizer, TextRow(text, 1)) == ["4", "6"]
    loop = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    plain = smollm2_with(loop + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    with pytest.raises(UserError, match="rows.jsonl:1: the chat template writes no special token after an answer"):
        tokenise(plain, TextRow("user: x\nassistant: 4\nuser: y\n", 1, "rows.jsonl"), len(plain))


def test_the_date_in_a_template_is_that_of_the_run() -> None:
    """Else a run that goes on the next day would have other data."""
    tokenizer, day = smollm2_with("{{ strftime_now('%d %b %Y') }}" + SMOLLM2), datetime.date(1999, 1, 2)
    ((ids, _),) = tokenise(tokenizer, chat("x", "4"), len(tokenizer), ChatOptions(date=day))
    assert tokenizer.decode(ids).startswith("02 Jan 1999<|im_start|>")
    ((ids, _),) = tokenise(tokenizer, chat("x", "4"), len(tokenizer))
    assert tokenizer.decode(ids).startswith(f"{datetime.date.today():%d %b %Y}<|im_start|>")


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
        tokenizer_object=tokenizer,
        chat_template=mistral().chat_template,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    ((ids, mask),) = tokenise(fast, chat("two", "answer", "plus", "two plus"), len(fast))
    assert fast.convert_ids_to_tokens(ids[mask]) == ["▁answer", "</s>", "▁two", "▁plus", "</s>"]


def thoughts_left_out() -> tuple[PreTrainedTokenizerFast, Conversation]:
    """Like DeepSeek R1: the template drops thoughts even from the newest answer."""
    content = "message['content'].split('</think>')[-1]"
    return smollm2_with(SMOLLM2.replace("message['content']", content)), chat("x", "<think>\nstep\n</think>\n\n4")


def rewritten_prefix() -> tuple[PreTrainedTokenizerFast, Conversation]:
    template = SMOLLM2.replace("messages %}", "messages %}{{ messages | length }}", 1)
    return smollm2_with(template), chat("x", "4")


def upper_case() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return smollm2_with(SMOLLM2.replace("message['content']", "message['content'] | upper")), chat("x", "fine")


def end_token_not_special() -> tuple[PreTrainedTokenizerFast, Conversation]:
    tokenizer = build(SMOLLM2, ["<|endoftext|>", "<|im_start|>"], eos_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=False)])
    return tokenizer, chat("x", "fine")


def header_merges_with_answer() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return smollm2(), chat("x", "\n\nfine")


def begins_with_answer() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return smollm2(), Conversation([{"role": "assistant", "content": "4"}], 7, "rows.jsonl")


def refusing_template() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return gemma(), chat("x", "4", system="You are helpful")


def silent_user() -> tuple[PreTrainedTokenizerFast, Conversation]:
    """The system prompt moves to the newest message, which has no text that shows where it is."""
    return mistral(), chat("x", "4", "", "6", system="You are helpful")


def no_template() -> tuple[PreTrainedTokenizerFast, Conversation]:
    return smollm2_with(""), chat("x", "4")


def splits_by_what_follows() -> tuple[PreTrainedTokenizerFast, Conversation]:
    """GPT-2 makes "\n\n" one token at the end of a prompt and two before text; none of them crosses the border."""
    return llama3(GPT2_SPLIT), chat("x", "fine")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (thoughts_left_out, "message 1: the chat template does not render the answer as it stands"),
        (rewritten_prefix, "message 1: the chat template rewrites history"),
        (upper_case, "does not render the answer"),
        (end_token_not_special, "no end-of-turn token after the answer .*is it marked special"),
        (header_merges_with_answer, "message 1: one token lies across the border"),
        (splits_by_what_follows, "message 1: the tokens before the answer differ"),
        (begins_with_answer, "begins with an assistant turn"),
        (refusing_template, "refuses the messages: System role not supported"),
        (silent_user, "message 4: the chat template rewrites history"),
        (no_template, "no chat template"),
    ],
)
def test_what_cannot_be_masked_rightly_is_refused(case: Callable, message: str) -> None:
    tokenizer, record = case()
    with pytest.raises(UserError, match=f"rows.jsonl:7.*{message}") as caught:
        tokenise(tokenizer, record, len(tokenizer))
    assert "\n" not in str(caught.value)


def test_token_rows_are_passed_through_and_checked() -> None:
    ((ids, mask),) = tokenise(None, TokenRow([3, 9, 0], [0, 1, 1], 4, "rows.jsonl"), 10)
    assert ids.dtype == np.int32 and mask.dtype == bool
    assert ids.tolist() == [3, 9, 0] and mask.tolist() == [False, True, True]
    for bad in (10, -1):
        with pytest.raises(UserError, match=f"rows.jsonl:4: token id {bad} at position 1 is outside 0..9"):
            tokenise(None, TokenRow([3, bad], [0, 1], 4, "rows.jsonl"), 10)


def test_a_tokenizer_larger_than_the_target_is_refused() -> None:
    with pytest.raises(UserError, match="outside 0..49; was it tokenised for another target"):
        tokenise(smollm2(), chat("x", "4"), 50)
