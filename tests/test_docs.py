"""The documentation names tests: each must exist."""

import re
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def test_every_test_that_the_list_of_field_bugs_names_exists() -> None:
    named, file = [], ""
    for path, test in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", (REPO / "docs" / "field-bugs.md").read_text()):
        file = path or file  # `::test` alone is in the file named before
        named.append((file, test))
    named = [(file, test) for file, test in named if file]
    assert len(named) > 100
    absent = [
        f"{file}::{test}"
        for file, test in named
        if not (REPO / file).exists() or f"def {test}" not in (REPO / file).read_text()
    ]
    assert not absent
