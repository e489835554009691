"""`eagle3 generate`: one prompt in, text out as it is committed, plain or speculative."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3_jax.cli.common import (
    DraftOption,
    DTypeOption,
    JsonOption,
    MeshOption,
    NamedTargetOption,
    QuantizeOption,
    note,
    open_pair,
    warn_of_pair,
    write_json,
)
from eagle3_jax.errors import UserError

if TYPE_CHECKING:
    from eagle3_jax.models.target import Target


def generate_command(
    prompt: Annotated[str, typer.Argument(help="The user's message; `-` reads it from stdin.")],
    target: NamedTargetOption = None,
    draft: DraftOption = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="plain, chain:K for K draft tokens a round, tree:DxKxN: D levels of the K likeliest, N verified, or "
            "auto: another one each round, by what pays here.",
            show_default="chain:3 with a draft, else plain",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the K likeliest tokens; 0 = off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Of tokens in prompt and answer; 1 = off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Of tokens in the answer; 0 = off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same for each time they occur.")] = 0.0,
    min_tokens: Annotated[int, typer.Option(help="No end of the answer before so many tokens.")] = 0,
    sample_draft: Annotated[bool, typer.Option("--sample-draft", help="Draw draft tokens, verify by p/q.")] = False,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    dtype: DTypeOption = "bfloat16",
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt, without the chat template.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Answer one prompt. Text goes to stdout as it is committed, measurements to stderr."""
    text = _read_prompt(prompt)
    strategy = strategy or ("chain:3" if draft else "plain")
    loaded, pair = open_pair(target, draft, dtype, mesh, quantize)
    from eagle3_jax.data.detokeniser import Vocabulary, text_of
    from eagle3_jax.speculate.generate import generate, nonfinite_warning
    from eagle3_jax.speculate.request import SamplingParams

    ids = _prompt_ids(loaded, text, raw, {} if pair is None else pair.chat_template)
    warn_of_pair(loaded, pair)
    vocabulary = Vocabulary(loaded.tokenizer)
    printer = _Printer(vocabulary)
    sampling = SamplingParams(
        *(max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty),
        min_tokens=min_tokens,
        seed=seed,
    )
    result = generate(
        loaded, pair, ids, strategy=strategy, sampling=sampling, sample_draft=sample_draft, on_tokens=printer.print
    )
    printer.finish()
    if warning := nonfinite_warning([result]):
        note(warning)
    tok_s = printer.tokens_per_second()
    note(_closing_line(result, tok_s, pair.taps.words(loaded.num_layers) if pair else None))
    answer = {"tokens": result.tokens, "text": text_of(vocabulary, result.tokens)}
    facts = {"tau": result.tau, "tok_s": tok_s, "finish_reason": result.finish_reason, "strategy": strategy}
    write_json(json_file, {**answer, "accepted": result.accepted, "drafts": result.drafts, **facts})


def _read_prompt(prompt: str) -> str:
    try:
        # Bytes of the command line that are no UTF-8 arrive as lone surrogates.
        text = sys.stdin.buffer.read().decode() if prompt == "-" else prompt.encode().decode()
    except UnicodeError as error:
        raise UserError("the prompt is not UTF-8 text / convert it, for example with iconv") from error
    if not text.strip():
        source = "stdin" if prompt == "-" else "PROMPT"
        raise UserError(f"the prompt is empty / {source} / give some text, or `-` to read it from stdin")
    return text


def _prompt_ids(target: "Target", text: str, raw: bool, template: dict[str, Any]) -> list[int]:
    from eagle3_jax.data.template import prompt_ids, text_ids

    tokenizer = target.require_tokenizer()
    if raw:
        return text_ids(tokenizer, text)
    if not tokenizer.chat_template:
        raise UserError(f"the target has no chat template / {target.path} / use --raw, or an instruct model")
    return prompt_ids(tokenizer, [{"role": "user", "content": text}], template=template)


class _Printer:
    """Prints committed tokens; on a terminal, accepted draft tokens are coloured. Keeps the time of the rounds."""

    def __init__(self, vocabulary: Any):
        from rich.console import Console

        from eagle3_jax.data.detokeniser import Detokeniser

        self.console = Console(highlight=False)
        self.detokeniser = Detokeniser(vocabulary)
        self.calls = 0
        self.first_round_end = self.last_round_end = 0.0
        self.timed_tokens = 0

    def print(self, _request: int, new: list[int]) -> None:
        """Called with the token of the prefill, then with those of each round: accepted drafts and one of the target's.

        A round that was cut may end in a draft token, which then counts as the target's; only its colour is wrong.
        """
        self.calls += 1
        self.last_round_end = time.perf_counter()
        if self.calls == 2:
            self.first_round_end = self.last_round_end
        elif self.calls > 2:
            self.timed_tokens += len(new)
        for i, token in enumerate(new):
            self._write(self.detokeniser.push(token), "green" if i < len(new) - 1 else None)
        sys.stdout.flush()

    def finish(self) -> None:
        self._write("\n", None)
        sys.stdout.flush()

    def tokens_per_second(self) -> float | None:
        """Of all rounds but the first, which may include compiling; None if there was no second one."""
        if not self.timed_tokens:
            return None
        return self.timed_tokens / (self.last_round_end - self.first_round_end)

    def _write(self, text: str, style: str | None) -> None:
        if style and text and self.console.is_terminal:
            self.console.out(text, style=style, end="")
        else:
            sys.stdout.write(text)


def _closing_line(result: Any, tok_s: float | None, taps: str | None) -> str:
    speed = "no second round to time" if tok_s is None else f"{tok_s:.1f} tok/s (decoding, from the second round on)"
    tau = f"tau {result.tau:.2f} over {len(result.accepted)} rounds"
    parts = [f"{len(result.tokens)} tokens", f"finished by {result.finish_reason}", tau, speed]
    return ", ".join(parts + [f"taps {taps}"] * (taps is not None))
