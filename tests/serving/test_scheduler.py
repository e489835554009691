"""Who runs next, and what of a prompt need not be read: no arrays, no models."""

import pytest

import eagle3_jax as e3
from eagle3_jax.errors import UserError
from eagle3_jax.serving.cache import SlotCache, bytes_per_token, slots_for
from eagle3_jax.serving.requests import Request
from eagle3_jax.serving.scheduler import Chunk, Round, Scheduler, Sequence
from tests.tiny import random_draft


def sequence(prompt: int, strategy: str = "plain") -> Sequence:
    request = Request("name", tuple(range(3, 3 + prompt)), e3.SamplingParams(), strategy)
    return Sequence(request, strategy, frozenset(), 10, print)


def scheduler(*waiting: Sequence, slots: int = 4, chunk: int = 8) -> Scheduler:
    made = Scheduler(SlotCache(slots, drafts=False, reuse=False), chunk)
    made.waiting.extend(waiting)
    made.admit()
    return made


def step(made: Scheduler) -> Chunk | Round | None:
    """Runs what is next, as the engine would."""
    action = made.next()
    if isinstance(action, Chunk):
        action.sequence.slot.read = action.stop
        if action.stop == len(action.sequence.request.prompt):
            made.prompt_read(action.sequence)
    return action


def test_a_long_prompt_is_read_in_chunks_with_rounds_between() -> None:
    short, long = sequence(3), sequence(30)
    made = scheduler(short, long)
    taken = [step(made) for _ in range(9)]
    sizes = [(a.stop - a.start) if isinstance(a, Chunk) else "round" for a in taken]
    assert sizes == [3, "round", 8, "round", 8, "round", 8, "round", 6]
    assert made.next().sequences == [short, long]


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    long, short = sequence(80), sequence(5)
    made = scheduler(long, short)
    taken = [step(made) for _ in range(4)]
    assert [action.sequence for action in taken[:2]] == [long, short] and taken[2].sequences == [short]
    assert taken[3].sequence is long


def test_short_prompts_share_a_chunk() -> None:
    made = scheduler(*(sequence(4) for _ in range(4)))
    assert [type(step(made)) for _ in range(5)] == [Chunk, Chunk, Round, Chunk, Chunk]


def test_strategies_take_turns() -> None:
    some = [sequence(1, name) for name in ("plain", "chain:2", "plain", "tree:2x2x4")]
    made = scheduler(*some)
    while made.reading:
        step(made)
    turns = [made.next() for _ in range(6)]
    assert sorted(turn.strategy for turn in turns[:3]) == ["chain:2", "plain", "tree:2x2x4"]
    assert [turn.strategy for turn in turns[3:]] == [turn.strategy for turn in turns[:3]]
    assert next(turn for turn in turns if turn.strategy == "plain").sequences == [some[0], some[2]]


def test_first_come_first_served() -> None:
    many = [sequence(2) for _ in range(5)]
    made = scheduler(*many, slots=2)
    assert list(made.reading) == many[:2] and list(made.waiting) == many[2:] and made.admit() == []
    made.remove(many[1])
    made.remove(many[3])
    assert [admitted for admitted, _ in made.admit()] == [many[2]] and list(made.waiting) == [many[4]]
    assert scheduler().next() is None


# --- slots


def held(cache: SlotCache, text: list[int], read: int, draft_read: int, free: bool = True) -> int:
    slot = cache.take([9999]).slot
    slot.text, slot.read, slot.draft_read = text, read, draft_read
    if free:
        cache.give_back(slot)
    return slot.row


def test_what_of_a_prompt_need_not_be_read() -> None:
    text = list(range(10, 30))
    for drafts, read, draft_read, prompt, spared in (
        (False, 20, 0, [*text, 1], 20),
        (True, 20, 20, [*text, 1], 19),  # the draft's entry of the last equal token depends on the one after it
        (True, 20, 4, [*text, 1], 4),
        (True, 7, 7, [*text, 1], 6),
        (False, 20, 20, text, 19),  # one token is read for its logits
        (True, 20, 20, text[:1], 0),
        (True, 20, 20, [*text[:9], 1, 2], 8),
        (True, 20, 20, [1, *text], 0),
    ):
        cache = SlotCache(1, drafts, reuse=True)
        held(cache, text, read, draft_read)
        place = cache.take(prompt)
        assert (place.slot.read, place.copy_from) == (spared, None), (drafts, read, draft_read, prompt)
        assert place.slot.text == prompt and place.slot.busy and cache.free == []


def test_a_busy_or_much_longer_text_is_copied_from() -> None:
    text = list(range(10, 30))
    for length, free, copies in ((20, False, True), (20, True, False), (9, True, True)):
        cache = SlotCache(3, drafts=True, reuse=True)
        row = held(cache, text, 20, 20, free)
        place = cache.take([*text[:length], 1])
        assert place.slot.read == length - 1 and place.copy_from == (row if copies else None)
        assert (place.slot.row == row) != copies


def test_what_a_failed_request_left_is_not_used() -> None:
    cache = SlotCache(1, drafts=True, reuse=True)
    slot = cache.take([1, 2, 3]).slot
    slot.commit([4, 5], 0)
    assert (slot.read, slot.draft_read, cache.tokens) == (4, 4, 4)
    slot.forget()
    cache.give_back(slot)
    assert cache.take([1, 2, 3]).slot.read == 0


def test_the_memory_of_slots(shallow_target) -> None:
    draft = random_draft(shallow_target, taps=(0, 1, 2))
    assert bytes_per_token(shallow_target, draft) == (2 * 2 * 2 * 32 * 4, 2 * 1 * 1 * 16 * 4)
    slot = 100 * (1024 + 128)
    assert slots_for(3 * slot + 5, 100, shallow_target, draft) == 3
    with pytest.raises(UserError, match="a slot of 100 tokens takes 0.1 MiB"):
        slots_for(slot - 1, 100, shallow_target, draft)
