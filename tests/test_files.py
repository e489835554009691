"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from eagle3_jax.files import whole_file, write_whole


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
