"""Training answers written by the target itself: a draft must be trained on what its target says.

Output rows are {"id", "input_ids", "loss_mask"}: the very ids that were generated, since text that is tokenised again
may come out as other ids. The file is appended to as answers finish; a second run continues where the first stopped.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_jax.data.files import is_hub
from eagle3_jax.data.records import read_prompts
from eagle3_jax.data.template import ChatOptions, check_variables, prompt_ids
from eagle3_jax.errors import UserError
from eagle3_jax.files import held, write_whole
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.slots import Request, generate_many


@dataclass(frozen=True)
class AnswerSettings:
    """max_prompt, max_new_tokens: tokens; slots: sequences decoded together; temperature 0 = greedy; samples: answers
    of each prompt, numbered together (answer s of prompt i has id i * samples + s). template: variables of the chat
    template, as `data.chat_template` of a config.

    Raises UserError for values out of range.
    """

    max_prompt: int = 512
    max_new_tokens: int = 256
    slots: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    samples: int = 1
    template: Mapping[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """What a file that is continued must have been begun with."""
        facts = vars(self) | {"slots": None, "template": dict(self.template)}
        if not self.template:  # files of older versions do not state it
            del facts["template"]
        return facts | ({"samples": None} if self.samples == 1 else {})

    def __post_init__(self):
        for name in ("max_prompt", "max_new_tokens", "slots", "samples"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)} / it must be at least 1")
        if not (self.temperature >= 0 and 0 < self.top_p <= 1):
            raise UserError(
                f"temperature {self.temperature}, top_p {self.top_p} / temperature must be >= 0, top_p in (0, 1]"
            )
        if self.samples > 1 and self.temperature == 0:
            raise UserError(f"samples is {self.samples}, temperature 0 / greedy answers are all the same; raise it")


@dataclass
class AnswerCounts:
    """Conversations: asked for, found in the file, written now, left out because the first prompt is too long.

    tokens: generated now.
    """

    prompts: int = 0
    already_there: int = 0
    written: int = 0
    too_long: int = 0
    tokens: int = 0


def generate_answers(
    target: Target,
    prompts: Path,
    out: Path,
    settings: AnswerSettings,
    progress: Callable[[AnswerCounts], None],
    limit: int | None = None,
) -> AnswerCounts:
    """Answers the first turn of every prompt of a JSONL file, then the next ones in the light of the answers.

    Rows already in `out` are kept and not written again; a torn last line is dropped. limit: only the first so many
    prompts; a later run may ask for more. A conversation ends early at a cut answer and before a prompt that is longer
    than `max_prompt` or leaves no room for an answer in the target's context. Raises UserError if `out` was begun with
    another target, prompt file or settings, or cannot be written.
    """
    room = target.config.max_positions - settings.max_new_tokens
    if room < 1:
        raise UserError(
            f"max_new_tokens is {settings.max_new_tokens}, the target's context is {target.config.max_positions} / "
            "ask for fewer"
        )
    check_variables(target.require_tokenizer(), ChatOptions(template=settings.template))
    asked = read_prompts(prompts)
    conversations = [turns for turns in asked[:limit] for _ in range(settings.samples)]
    facts = {
        "target": target.fingerprint["hash"],
        "prompts": prompts_hash(prompts, asked),
        "settings": settings.facts(),
    }
    with continued(out, facts) as done:
        pending = {i: _Dialogue(turns) for i, turns in enumerate(conversations) if i not in done}
        counts = AnswerCounts(prompts=len(conversations), already_there=len(conversations) - len(pending))
        progress(counts)
        while pending:
            requests = []
            for i in list(pending):
                ids = pending[i].next_prompt(target, settings.template)
                if len(ids) > min(settings.max_prompt, room):
                    _finish(out, i, pending.pop(i), counts)
                    progress(counts)
                else:
                    requests.append(Request(i, ids))
            requests.sort(key=lambda r: len(r.prompt))
            for request in _run(target, requests, settings):
                dialogue = pending[request.index]
                dialogue.add_answer(request, target)
                counts.tokens += len(request.tokens)
                if dialogue.complete(target):
                    _finish(out, request.index, pending.pop(request.index), counts)
                progress(counts)
    return counts


def _finish(out: Path, index: int, dialogue: "_Dialogue", counts: AnswerCounts) -> None:
    """Writes what there is of a conversation; without any answer there is nothing to write."""
    if not dialogue.ids:
        counts.too_long += 1
        return
    append_row(out, {"id": index, "input_ids": dialogue.ids, "loss_mask": dialogue.mask})
    counts.written += 1


def _run(target: Target, requests: list[Request], settings: AnswerSettings):
    if not requests:
        return iter(())
    return generate_many(
        target,
        requests,
        max_prompt=max(len(r.prompt) for r in requests),
        max_new_tokens=settings.max_new_tokens,
        slots=settings.slots,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
    )


class _Dialogue:
    """A conversation being written: user turns given, answers as they come."""

    def __init__(self, turns: list[str]):
        self.turns = turns
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []
        self.mask: list[int] = []

    def next_prompt(self, target: Target, template: Mapping[str, Any]) -> list[int]:
        self.messages.append({"role": "user", "content": self.turns[len(self.messages) // 2]})
        return list(map(int, prompt_ids(target.require_tokenizer(), self.messages, "prompt", template=template)))

    def add_answer(self, request: Request, target: Target) -> None:
        # Earlier answers are part of the prompt now, as the server would see them: tokenised again. Where that gives
        # the very ids that were generated they stay supervised, otherwise only the newest answer is.
        same = request.prompt[: len(self.ids)] == self.ids
        earlier = self.mask if same else []
        self.mask = earlier + [0] * (len(request.prompt) - len(earlier)) + [1] * len(request.tokens)
        self.ids = request.prompt + request.tokens
        text = target.require_tokenizer().decode(request.tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})

    def complete(self, target: Target) -> bool:
        """All turns answered, or the answer was cut: what would follow a cut answer is not a real conversation."""
        return len(self.messages) == 2 * len(self.turns) or self.ids[-1] not in target.eos_token_ids


def prompts_hash(prompts: Path, turns: list[list[str]]) -> str:
    """Of the file; of a dataset of the hub, of what was read from it."""
    content = json.dumps(turns).encode() if is_hub(prompts) else prompts.read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]


def require_same_facts(out: Path, facts: dict) -> None:
    """Raises UserError unless `out` was begun with these facts, which lie beside it as `<out>.facts.json`."""
    try:
        before = json.loads(_facts_file(out).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{out} exists, but this command did not begin it / choose another --out or remove it"
        ) from error
    except ValueError as error:
        raise UserError(f"{_facts_file(out)} is not valid JSON / choose another --out or remove {out}") from error
    if before != facts:
        differing = ", ".join(_differences(before, facts))
        raise UserError(f"{out} was begun with other settings ({differing}) / use those, or choose another --out")


def write_facts(out: Path, facts: dict) -> None:
    write_whole(_facts_file(out), json.dumps(facts) + "\n")


def _facts_file(out: Path) -> Path:
    return out.with_name(out.name + ".facts.json")


def _differences(before: dict, now: dict) -> list[str]:
    """What differs, in words: `temperature 0.0, now 0.7`."""
    words = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            words += _differences(old, new)
        elif old != new:
            words.append(f"{key} {old}, now {new}")
    return words


@contextmanager
def continued(out: Path, facts: dict) -> Iterator[set[int]]:
    """Ids of the rows already in `out`, which is made ready to be appended to, by this process alone until the block
    ends. Raises UserError if it was begun with other facts, if another process writes to it, or if it cannot be."""
    with ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.touch()
            stack.enter_context(held(out))
            if out.stat().st_size == 0:
                write_facts(out, facts)
            require_same_facts(out, facts)
            whole = out.read_bytes()
            kept = whole[: whole.rfind(b"\n") + 1]
            with open(out, "r+b") as file:
                file.truncate(len(kept))  # a last line torn by a crash, if there is one
        except OSError as error:
            raise UserError(f"cannot write answers / {out} / {error.strerror or error}") from error
        yield {_row_id(out, line, raw) for line, raw in enumerate(kept.splitlines(), start=1)}


def _row_id(out: Path, line: int, raw: bytes) -> int:
    try:
        return int(json.loads(raw)["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{out}:{line} is not a row of answers / remove the line or choose another --out") from error


def append_row(out: Path, row: dict) -> None:
    try:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write answers / {out} / {error.strerror or error} / free space and run again"
        ) from error
