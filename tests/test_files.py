"""Files that appear whole or not at all, what one process holds alone, and JSON with two values of a key."""

from pathlib import Path

import pytest

from eagle3_jax.errors import UserError
from eagle3_jax.files import held, parse_json, whole_file, write_whole


def test_a_file_is_replaced_when_all_of_it_is_written_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.parent == tmp_path
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with pytest.raises(type(error)), whole_file(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="Not a directory"):
        write_whole(path / "below a file", "text")


def test_what_is_held_nobody_else_holds_until_it_is_let_go(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.touch()
    for place in (tmp_path, file, file):
        with held(place), pytest.raises(UserError, match="another process is writing there"), held(place):
            pass


def test_json_with_two_values_of_a_key_is_none() -> None:
    assert parse_json('{"a": 1, "b": {"a": 2}, "a": 1}') == {"a": 1, "b": {"a": 2}}
    for text in ('[{"a": 1, "a": 2}]', '{"a": {"b": [1], "b": []}}', "[" * 100000, '{"a": ' + "1" * 5000 + "}"):
        with pytest.raises(ValueError):
            parse_json(text)
