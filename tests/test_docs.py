"""The documentation names tests: each must exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_that_the_list_of_field_bugs_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS.parent / "docs" / "field-bugs.md").read_text())
    assert len(named) > 50
    absent = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (TESTS / file).read_text()]
    assert not absent
