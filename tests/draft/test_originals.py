"""Every option of the draft against logits that speculators 0.9 computed: tests/golden/originals.npz, made by
`tools/check_with_originals.py --record` on drafts that are random but the same each time."""

import numpy as np
import pytest

from tools.check_with_originals import RECORDED, STEPS, random_draft, variants, worst_difference


@pytest.fixture(scope="module")
def recorded(golden) -> dict[str, np.ndarray]:
    return dict(np.load(golden("originals.npz")))


@pytest.mark.parametrize("name", variants())
def test_logits_of_the_original(recorded, name: str) -> None:
    theirs = {f"logits.{step}": recorded[f"{name}/logits.{step}"] for step in range(STEPS)}
    assert theirs["logits.0"].shape[-1] == RECORDED
    assert worst_difference(random_draft(variants()[name]), theirs) < 1e-4
