"""A store of our own features: the same training as online, whole after a kill, damage noticed, read in any order."""

import datetime
import json

import numpy as np
import pytest

from eagle3_jax.cli.main import main
from eagle3_jax.data.store import FeatureStore, bytes_a_token, decode, encode
from eagle3_jax.errors import UserError
from eagle3_jax.taps import TapSet, WiringError
from eagle3_jax.training import make_store, trainer
from eagle3_jax.training.dataset import read_documents
from tests.training.conftest import read_metrics


@pytest.fixture(scope="module")
def documents(world):
    return read_documents(world.few, world.target).items


def written(world, documents, folder, dtype="bfloat16", taps=(1, 2, 4), **options):
    return make_store.make_store(world.target, documents, TapSet(taps), folder, dtype, 96, 2, 128, **options)


@pytest.fixture(scope="module")
def stores(world, documents, tmp_path_factory):
    """Folders of a bfloat16 and an int8 store, several shards each."""
    root = tmp_path_factory.mktemp("stores")
    for dtype in ("bfloat16", "int8"):
        assert len(written(world, documents, root / dtype, dtype)["shards"]) > 3
    return root


def test_numbers_survive_storing() -> None:
    states = np.random.default_rng(0).standard_normal((5, 3, 16)).astype(np.float32) * [[[100.0], [1.0], [1e-3]]]
    for dtype, error in (("bfloat16", 4e-3), ("int8", 5e-3)):
        stored = encode(states, dtype)
        back = decode(stored["states"], stored.get("scales")).astype(np.float32)
        assert (
            np.abs(back - states).max(-1).max() <= error * np.abs(states).max()
            and stored["states"].shape == states.shape
        )
        assert (np.abs(back - states) <= error * np.abs(states).max(-1, keepdims=True)).all()  # row by row
        assert sum(a.nbytes for a in stored.values()) == 5 * (bytes_a_token(3, 16, dtype) - 5)
    assert not decode(*encode(np.zeros((1, 1, 4), np.float32), "int8").values()).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_training_from_the_store_is_training_online(world, stores, uninterrupted_few, tmp_path, dtype) -> None:
    config = world.config(tmp_path, data={"train": str(stores / dtype)}, training={"epochs": 1})
    trainer.train(config, target=world.target)
    for mine, online in zip(read_metrics(config.run_dir), uninterrupted_few, strict=True):
        np.testing.assert_allclose(mine["loss"], online["loss"], rtol=2e-2)


@pytest.fixture(scope="module")
def uninterrupted_few(world, tmp_path_factory):
    config = world.config(tmp_path_factory.mktemp("online"), training={"epochs": 1})
    trainer.train(config, target=world.target)
    return read_metrics(config.run_dir)


def test_documents_are_read_alone_in_any_order(world, documents, stores) -> None:
    grain = pytest.importorskip("grain.python")
    store = FeatureStore(stores / "bfloat16")
    assert len(store) == len(documents)
    loader = grain.MapDataset.source(store).shuffle(seed=1)
    seen = [loader[i] for i in range(len(store))]
    assert sorted(d["input_ids"].tolist() for d in seen) == sorted(ids.tolist() for ids, _ in documents)
    out = world.target.forward(documents[5][0][None], taps=(1, 2, 4))
    for i, expected in enumerate((*out.taps.arrays, out.last_hidden)):
        np.testing.assert_allclose(store[5]["states"][:, i].astype(np.float32), expected[0], rtol=1e-2, atol=1e-2)


def test_documents_that_are_stored_twice_are_left_out_on_request(world, stores) -> None:
    files = [str(stores / "bfloat16"), str(stores / "int8")]
    kept, dropped = (read_documents(files, world.target, drop_duplicates=drop) for drop in (False, True))
    assert (kept.duplicates, kept.dropped, dropped.dropped) == (16, 0, 16)
    assert len(kept.items) == len(kept.samples) == 32 and len(dropped.items) == len(dropped.sources) == 16
    assert {sample.path.parent for sample in dropped.samples} == {stores / "bfloat16"}


def test_killed_and_run_again_it_is_the_same_store(world, documents, stores, tmp_path) -> None:
    folder, real, calls = tmp_path / "store", make_store._write_shard, []

    def killed(*arguments):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(0)
        real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_store, "_write_shard", killed)
        with pytest.raises(KeyboardInterrupt):
            written(world, documents, folder)
    with pytest.raises(UserError, match="the store is unfinished"):
        FeatureStore(folder)
    (folder / ".shard-00002.safetensors.tmp").write_bytes(b"torn")
    said = []
    index = written(world, documents, folder, say=said.append)
    assert index == json.loads((stores / "bfloat16" / "index.json").read_text())
    assert f"{sum(len(ids) for ids, _ in documents):,} tokens" not in said[0] and "GB free" in said[0]
    with pytest.raises(UserError, match=r"begun otherwise .taps \[1, 2, 4\] there, \[1, 2\] here"):
        written(world, documents, folder, taps=(1, 2))


def test_damage_other_taps_and_other_targets_are_refused(world, documents, stores, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "store"
    written(world, documents, folder)
    shard = folder / "shard-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    offset = 8 + header + json.loads(raw[8 : 8 + header])["states"]["data_offsets"][0]
    raw[offset] ^= 1
    shard.write_bytes(raw)
    store = FeatureStore(folder)
    first = len(store.facts["shards"][0]["lengths"])
    store.states(0)
    with pytest.raises(UserError, match=f"document {first} is damaged"):
        store.states(first)
    with pytest.raises(UserError, match="another target"):
        store.require_target({"hash": "x"}, None, "other")
    store.facts["tokenizer"] = "a"
    store.require_target(world.target.fingerprint, None, "it")
    with pytest.raises(UserError, match="another tokenizer than that of it"):
        store.require_target(world.target.fingerprint, "b", "it")
    index = json.loads((folder / "index.json").read_text())
    untold = {key: value for key, value in index.items() if key != "taps"}
    for damaged in ([], untold, index | {"shards": [{}]}, index | {"shards": [index["shards"][0] | {"checksums": []}]}):
        (folder / "index.json").write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="index.json is damaged|not a store"):
            FeatureStore(folder)
    (folder / "index.json").write_text(json.dumps(index))
    shard.unlink()
    with pytest.raises(UserError, match="shard-00001.safetensors is missing"):
        FeatureStore(folder)
    data = {"train": str(stores / "bfloat16")}
    with pytest.raises(WiringError, match=r"draft.taps are \[1, 3\]"):
        trainer.train(world.config(tmp_path, data=data, draft={"taps": [1, 3]}), target=world.target)
    monkeypatch.setattr(make_store.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 10}))
    with pytest.raises(UserError, match="the store needs .* GB are free"):
        written(world, documents, tmp_path / "small")


def test_the_command(world, tmp_path, capsys) -> None:
    command = ["data", "features", world.few, "--target", str(world.folder), "--dtype", "float32", "--length", "96"]
    options = ["--taps", "1,2,4", "--batch-rows", "2", "--json", str(tmp_path / "made.json")]
    assert main([*command, "--out", str(tmp_path / "s"), *options]) == 0
    assert "GB free" in capsys.readouterr().err and len(FeatureStore(tmp_path / "s")) == 16
    made = json.loads((tmp_path / "made.json").read_text())
    assert (made["taps"], made["documents"], made["shards"]) == ([1, 2, 4], 16, 1) and made["tokens"] > 16
    begun = tmp_path / "s" / "begun.json"  # as if it went on another day
    begun.write_text(json.dumps(json.loads(begun.read_text()) | {"date": "1999-01-02"}))
    assert make_store.begun_on(tmp_path / "s") == datetime.date(1999, 1, 2)
    assert main([*command, "--out", str(tmp_path / "s"), *options]) == 0
    for variables, words in (("{a: 1}", "made with {'a': 1}"), ("{}", "chat_template is {'b': 2}")):
        store = tmp_path / variables
        assert main([*command, "--out", str(store), *options, "--chat-template", variables]) == 0
        with pytest.raises(UserError, match=words):
            data = {"train": str(store), "chat_template": {"b": 2}}
            trainer.train(world.config(tmp_path, data=data), target=world.target)
    with pytest.raises(UserError, match="come with their masks"):
        data = {"train": str(store), "last_turn_only": True}
        trainer.train(world.config(tmp_path, data=data), target=world.target)
    for taps in ("low", "²"):
        assert main([*command, "--out", str(tmp_path / "s"), "--taps", taps]) == 2
    (tmp_path / "s" / "begun.json").write_text("[]")
    assert main([*command, "--out", str(tmp_path / "s"), "--taps", "1,2,4"]) == 2
    assert "begun.json is damaged" in capsys.readouterr().err
