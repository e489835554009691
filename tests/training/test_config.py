"""Configs: strict keys, overrides, one line for every fault, and no field without effect."""

import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from pydantic import BaseModel

from eagle3_jax.config import Config, OptimiserConfig, load_config
from eagle3_jax.errors import UserError
from eagle3_jax.training.optimiser import make_optimiser
from eagle3_jax.training.trainer import train

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALLEST = "name: x\ntarget: {path: demo}\ndata: {train: a.jsonl, heldout: b.jsonl}\n"


@pytest.fixture
def load(tmp_path):
    """`load(text, *overrides)` loads a config of that text."""

    def load(text: str | bytes, *overrides: str) -> Config:
        path = tmp_path / "config.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_config(path, overrides)

    return load


def complaint(load, text: str | bytes, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load(text, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults_are_those_of_the_paper(load) -> None:
    config = load(SMALLEST)
    assert (config.draft.taps, config.training.ttt_steps, config.training.step_decay) == ("paper", 3, 1.0)
    assert config.run_dir == Path("runs/x")


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("optimiser.learning_rate=1e-3", "optimiser", "learning_rate", 1e-3),  # YAML takes 1e-3 for text
        ("draft.taps=[2, 1, 4]", "draft", "taps", [2, 1, 4]),
        ("training.minutes=2.5", "training", "minutes", 2.5),
        ("data.train=[a, b]", "data", "train", ["a", "b"]),
        ("training.target_hub_id=org/model=x", "training", "target_hub_id", "org/model=x"),
        ("optimiser.betas=[0.8, 0.9]", "optimiser", "betas", (0.8, 0.9)),
    ],
)
def test_overrides_replace_values_with_or_without_their_section(load, override, section, field, value) -> None:
    assert getattr(getattr(load(SMALLEST, override), section), field) == value


def test_a_byte_order_mark_and_paths_from_the_home_folder(load, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    paths = ("target.path=~/t", "data.train=[~/a, hf:org/name]", "runs_dir=~/runs", "evaluation.prompts=~/p")
    config = load("\ufeff" + SMALLEST, *paths)
    assert (config.target.path, config.data.train) == ("/home/me/t", ["/home/me/a", "hf:org/name"])
    assert (str(config.run_dir), config.evaluation.prompts) == ("/home/me/runs/x", "/home/me/p")


def test_later_overrides_win(load) -> None:
    assert load(SMALLEST, "training.epochs=3", "training.epochs=4", "name=y").training.epochs == 4


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.epochs", "a.b=c"),
        ("=3", "a.b=c"),
        ("name.first=3", "name is a value"),
        ("training.epochs=[1", "not valid YAML"),
        ("training.epoch=3", "did you mean training.epochs?"),
        ("trainin.epochs=3", "did you mean training?"),
        ("optimizer.learning_rate=3", "did you mean optimiser?"),
    ],
)
def test_bad_overrides(load, override, words) -> None:
    assert words in complaint(load, SMALLEST, override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.epochs=three", "training.epochs"),
        ("training.epochs=0", "training.epochs"),
        ("training.epochs=true", "training.epochs"),
        ("optimiser.clip=false", "optimiser.clip"),
        ("training=7", "training"),
        ("draft.taps=middle", "draft.taps"),
        ("draft.taps=[one]", "draft.taps"),
        ("draft.taps=[true, 2]", "draft.taps"),
        ("optimiser.betas=[0.9]", "optimiser.betas"),
        ("optimiser.betas=[0.9, 1.0]", "optimiser.betas"),
        ("optimiser.learning_rate=.inf", "optimiser.learning_rate"),
        ("target.dtype=float16", "target.dtype"),
        ("training.seed=-1", "training.seed"),
        ("name=../up", "name"),
        ("data.train=", "data.train"),
        ("data.train=''", "data.train"),
        ("data.heldout=[]", "data.heldout"),
        ("training.seed=99999999999999999999", "training.seed"),
    ],
)
def test_wrong_values_name_their_key(load, override, words) -> None:
    said = complaint(load, SMALLEST, override)
    assert f"config key {words}:" in said and "config.yaml" in said


def test_two_norms_before_fc_are_refused(load) -> None:
    assert "choose one" in complaint(load, SMALLEST, "draft.fc_norm=true", "draft.norm_before_fc=true")


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just text"])
def test_empty_files_and_lists_are_no_configs(load, text) -> None:
    assert "empty or no mapping" in complaint(load, text)


def test_files_that_cannot_be_read(load, tmp_path) -> None:
    assert "not valid YAML" in complaint(load, "name: [x\ntarget: y")
    assert "UTF-8" in complaint(load, b"name: \xff\n")
    assert "the key epochs twice" in complaint(load, SMALLEST + "training:\n  epochs: 1\n  epochs: 2\n")
    assert "nested too deep" in complaint(load, "x: " + "[" * 5000)
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(UserError, match="cannot read the config"):
            load_config(path)


def test_missing_keys_are_named(load) -> None:
    assert "target" in complaint(load, "name: x\ndata: {train: a, heldout: b}\n")
    assert "data.heldout" in complaint(load, "name: x\ntarget: {path: demo}\ndata: {train: a}\n")


def test_the_configs_of_the_repository_load() -> None:
    paths = sorted(CONFIGS.glob("*.yaml"))
    assert paths
    for path in paths:
        assert load_config(path).name


def test_every_field_is_used(world, tmp_path, monkeypatch) -> None:
    read = set()

    def recording(self, name: str):
        if name in type(self).model_fields:
            read.add((type(self), name))
        return BaseModel.__getattribute__(self, name)

    sections = {"evaluation": {"count": 1, "max_new_tokens": 4}, "tracking": {"to": ["trackio"]}}
    monkeypatch.setitem(sys.modules, "trackio", MagicMock())
    config = world.config(tmp_path, draft={"initialise": "last_block"}, training={"epochs": 1}, **sections)
    models = {type(config), *(type(value) for _, value in config if isinstance(value, BaseModel))}
    for model in models:
        monkeypatch.setattr(model, "__getattribute__", recording, raising=False)
    train(config)
    make_optimiser(OptimiserConfig(name="muon"))
    assert {(model, name) for model in models for name in model.model_fields} == read
