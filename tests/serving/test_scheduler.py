"""Who runs next, and what of a prompt need not be read: no arrays, no models."""

import pytest

import eagle3_jax as e3
from eagle3_jax.errors import UserError
from eagle3_jax.serving.cache import SlotCache, bytes_per_token, slots_for
from eagle3_jax.serving.requests import Request
from eagle3_jax.serving.scheduler import Chunk, Round, Scheduler, Sequence
from tests.tiny import random_draft


def sequence(prompt: int, strategy: str = "plain", begin: tuple[int, ...] = ()) -> Sequence:
    request = Request("name", (*begin, *range(3, 3 + prompt)), e3.SamplingParams(), strategy)
    return Sequence(request, strategy, frozenset(), 10, print)


def scheduler(*waiting: Sequence, slots: int = 4, chunk: int = 8, reuse: bool = False) -> Scheduler:
    made = Scheduler(SlotCache(slots, drafts=reuse, reuse=reuse), chunk)
    made.waiting.extend(waiting)
    made.admit()
    return made


def step(made: Scheduler) -> Chunk | Round | None:
    """Runs what is next, as the engine would."""
    action = made.next()
    if isinstance(action, Chunk):
        action.sequence.slot.read = action.sequence.slot.draft_read = action.stop
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


def test_a_burst_of_one_prompt_is_read_once() -> None:
    burst = [sequence(50) for _ in range(3)]
    other = sequence(20, begin=(9999,))
    made = scheduler(*burst[:2], other, burst[2], reuse=True)
    assert list(made.reading) == [burst[0], other] and list(made.waiting) == burst[1:]
    read, admitted = [], []
    while not admitted:
        read.append(step(made))
        admitted = made.admit()
    assert any(isinstance(action, Chunk) and action.sequence is other for action in read)  # it does not wait
    assert [one for one, _ in admitted] == burst[1:]
    assert [place.copy_from for _, place in admitted] == [burst[0].slot.row] * 2
    assert [50 - one.slot.read <= 16 for one in burst[1:]] == [True, True]  # which one small program reads


def test_who_waits_for_a_prompt_reads_it_if_the_other_leaves() -> None:
    first, second = sequence(50), sequence(50)
    made = scheduler(first, second, reuse=True)
    step(made)
    made.remove(first)
    assert [(one, place.slot.read) for one, place in made.admit()] == [(second, 7)]


def test_a_short_common_beginning_is_neither_waited_for_nor_copied() -> None:
    some = [sequence(30), sequence(30, begin=tuple(range(3, 15)))]
    made = scheduler(*some, reuse=True)
    assert list(made.reading) == some and some[1].slot.read == 0


def test_a_busy_or_much_longer_text_is_copied_from() -> None:
    text = list(range(10, 60))
    for length, free, copies in ((50, False, True), (50, True, False), (20, True, True)):
        cache = SlotCache(3, drafts=True, reuse=True)
        row = held(cache, text, 50, 50, free)
        place = cache.take([*text[:length], 1])
        assert place.slot.read == length - 1 and place.copy_from == (row if copies else None)
        assert (place.slot.row == row) != copies
        assert (cache.queries, cache.hits) == (length + 2, length - 1)  # and the one token of `held`


def test_of_equal_texts_the_free_slot_is_taken() -> None:
    cache = SlotCache(3, drafts=True, reuse=True)
    text = list(range(10, 60))
    slots = [cache.take([i]).slot for i in range(3)]
    for slot in slots:
        slot.text, slot.read, slot.draft_read = text, 50, 50
    cache.give_back(slots[2])
    cache.give_back(slots[1])
    place = cache.take([*text, 1])
    assert place.slot in slots[1:] and place.copy_from is None


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
