"""Documents to batches: every row once an epoch, nothing changed by padding or packing, faults in one line."""

import datetime
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data.packing import pack
from eagle3_jax.data.template import ChatOptions
from eagle3_jax.errors import UserError
from eagle3_jax.training import prepare
from eagle3_jax.training.dataset import (
    Documents,
    batches_in_order,
    data_warnings,
    make_batch,
    pack_documents,
    read_documents,
    rows_of_step,
    steps_an_epoch,
)
from tests.cli.tiny_target import tiny_tokenizer

GOOD = {"input_ids": [3, 4, 5, 6], "loss_mask": [0, 0, 1, 1]}
REFUSED = {"input_ids": [3, 4, 5, 999], "loss_mask": [0, 0, 1, 1]}  # the target has 48 tokens
UNSUPERVISED = {"input_ids": [3, 4, 5, 6], "loss_mask": [0, 0, 0, 0]}


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def packed_rows(rows: int, length: int = 8):
    """Rows of one document each; row r holds the tokens 10 r, 10 r + 1, ..."""
    documents = [(np.arange(length, dtype=np.int32) + 10 * r, np.arange(length) > 2) for r in range(rows)]
    return pack(documents, length)


@given(st.integers(1, 23), st.integers(1, 9), st.integers(0, 5))
def test_every_row_once_an_epoch(rows: int, batch_rows: int, epoch: int) -> None:
    per_epoch = -(-rows // batch_rows)
    steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    batches = [rows_of_step(step, rows, batch_rows, seed=1) for step in steps]
    assert sorted(sum(batches, [])) == list(range(rows))
    assert all(len(batch) == batch_rows for batch in batches[:-1])
    # A function of the step: asked in any order, again, it says the same.
    assert [rows_of_step(step, rows, batch_rows, seed=1) for step in reversed(steps)] == batches[::-1]


@given(st.integers(1, 23), st.integers(1, 9), st.integers(1, 5), st.data())
def test_short_passes_repeat_the_rows_of_the_first(rows: int, batch_rows: int, passed: int, data) -> None:
    pass_steps = data.draw(st.integers(1, -(-rows // batch_rows)))

    def rows_of_pass(number: int, short: int | None) -> list[list[int]]:
        steps = range(number * pass_steps, (number + 1) * pass_steps)
        return [rows_of_step(step, rows, batch_rows, 1, short) for step in steps]

    first = rows_of_pass(0, pass_steps)
    assert first == rows_of_pass(0, None)  # cutting the first pass short does not change what it has seen
    assert sorted(sum(rows_of_pass(passed, pass_steps), [])) == sorted(sum(first, []))


def test_epochs_and_seeds_have_their_own_order() -> None:
    orders = [tuple(rows_of_step(epoch, 20, 20, seed)) for epoch in range(3) for seed in range(3)]
    assert len(set(orders)) == 9


def test_batches_have_one_shape() -> None:
    packed = packed_rows(5)
    assert steps_an_epoch(packed, 2) == 3 and steps_an_epoch(packed, 5) == 1
    batches = list(batches_in_order(packed, 2))
    assert [rows for rows, _ in batches] == [[0, 1], [2, 3], [4]]
    assert {batch.ids.shape for _, batch in batches} == {(2, 8)}
    np.testing.assert_array_equal(batches[1][1].ids, packed.input_ids[2:4])
    last = batches[2][1]
    np.testing.assert_array_equal(last.document_ids, [[0] * 8, [-1] * 8])
    assert not last.loss_mask[1].any() and last.loss_mask[0].any()


def test_all_files_are_read(world, tmp_path) -> None:
    files = [write(tmp_path / "a", GOOD, GOOD), write(tmp_path / "b", GOOD | {"input_ids": [7, 8, 9, 10]})]
    documents = read_documents(files, world.target)
    assert [ids.tolist() for ids, _ in documents.items] == [[3, 4, 5, 6], [3, 4, 5, 6], [7, 8, 9, 10]]
    assert len(read_documents(files[1], world.target).items) == 1


def test_refused_rows_are_counted(world, tmp_path) -> None:
    path = write(tmp_path / "a", *[GOOD] * 5, REFUSED, *[GOOD] * 4)
    documents = read_documents(path, world.target)
    assert (len(documents.items), documents.refused) == (9, 1)
    assert f"{path}:6" in documents.first_refusal and "999" in documents.first_refusal


def test_too_many_refused_rows_are_an_error(world, tmp_path) -> None:
    path = write(tmp_path / "a", *[GOOD] * 4, REFUSED, *[GOOD] * 4)
    with pytest.raises(UserError, match=rf"1 of 9 rows cannot be used / first: {path}:5"):
        read_documents(path, world.target)


@pytest.mark.parametrize(
    "rows", [[], [{"body": "no"}], [{"text": "no tokenizer"}], [{"conversations": [{"role": "user", "content": "hi"}]}]]
)
def test_files_without_usable_data(world, tmp_path, rows) -> None:
    with pytest.raises(UserError) as error:  # the last: a chat, but the target has no tokenizer
        read_documents(write(tmp_path / "a", *rows), world.target)
    assert "\n" not in str(error.value)


def test_settings_that_token_rows_do_not_heed_are_refused(world, tmp_path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl:1: a row of input_ids comes with its loss_mask / leave last_turn"):
        read_documents(write(tmp_path / "a.jsonl", GOOD), world.target, options=ChatOptions(last_turn_only=True))


def test_the_day_on_which_a_run_began_is_that_of_its_chats(world, tmp_path) -> None:
    tokenizer = tiny_tokenizer("abcdefghijklmnopqrstuvwxyz\n0123456789")
    tokenizer.chat_template = "{{ strftime_now('%Y') }}" + tokenizer.chat_template
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    target, file = replace(world.target, tokenizer=tokenizer), write(tmp_path / "a.jsonl", {"messages": chat})
    documents, _ = prepare._read(world.config(tmp_path), file, target, datetime.date(1999, 1, 2))
    assert tokenizer.decode(documents.items[0][0]).startswith("1999<|start|>user")


def test_a_missing_file_is_named(world, tmp_path) -> None:
    with pytest.raises(UserError, match=r"absent\.jsonl: no such file"):
        read_documents(str(tmp_path / "absent.jsonl"), world.target)
    with pytest.raises(UserError, match="no such file"):
        read_documents("x" * 5000, world.target)
    with pytest.raises(UserError, match="/dev/null: no regular file"):
        read_documents("/dev/null", world.target)


def test_nothing_supervised_is_an_error_that_names_the_file(world, tmp_path) -> None:
    path = write(tmp_path / "a", UNSUPERVISED)
    documents = read_documents(path, world.target)
    assert isinstance(documents, Documents)
    with pytest.raises(UserError, match=rf"nothing to train on.*{path}"):
        pack_documents(documents.items, 8, path)


def test_make_batch_takes_the_rows_in_the_order_given() -> None:
    batch = make_batch(packed_rows(4), [3, 1], 2)
    assert sorted(batch.ids[:, 0].tolist()) != batch.ids[:, 0].tolist()


def test_duplicates_sources_and_leaks_are_told(world, tmp_path) -> None:
    other = GOOD | {"input_ids": [7, 8, 9, 10], "source": "b"}
    path = write(tmp_path / "rows.jsonl", GOOD, other, GOOD, UNSUPERVISED)
    kept, dropped = (read_documents(path, world.target, drop_duplicates=drop) for drop in (False, True))
    assert (kept.duplicates, kept.dropped, dropped.duplicates, dropped.dropped) == (1, 0, 1, 1)
    assert kept.sources == ["rows.jsonl", "b", "rows.jsonl", "rows.jsonl"]
    assert dropped.sources == ["rows.jsonl", "b", "rows.jsonl"] and len(dropped.items) == 3
    warnings = data_warnings(kept, pack_documents(kept.items, 8, path), dropped, 3)
    assert "1 of 4 documents have nothing supervised" in warnings[0]
    assert "7 documents are longer than the target's context of 3 tokens" in warnings[1]
    assert "3 of 3 held-out documents are also in the training data" in warnings[2]
    assert not data_warnings(dropped, pack_documents(dropped.items[:2], 8, path), Documents([], []), 4)
