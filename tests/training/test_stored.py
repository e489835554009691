"""Training from features stored by others: read right, the same loss as online, or refused."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3_jax.data import foreign
from eagle3_jax.errors import UserError
from eagle3_jax.taps import LastHidden, WiringError
from eagle3_jax.training import trainer
from eagle3_jax.training.dataset import make_batch, rows_of_step
from eagle3_jax.training.features import teacher
from eagle3_jax.training.step import compute_features, evaluate_batch
from tests.tiny import relative
from tests.torch_files import write_torch
from tests.training.conftest import read_metrics

INPUTS = {"convention": "block-input"}
OUTPUTS = {"convention": "block-output"}
BEFORE, AFTER = {"last_hidden": "pre-norm"}, {"last_hidden": "post-norm"}


@pytest.fixture(scope="module")
def documents(world) -> list[dict[str, Any]]:
    """The documents of world.few: ids, mask, the target's states at taps 0..4 and the normed last one (5)."""
    rows = [json.loads(line) for line in Path(world.few).read_text().splitlines()]
    width = max(len(row["input_ids"]) for row in rows)
    ids = np.array([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows], np.int32)
    out = world.target.forward(ids, taps=range(5))
    normed = jax.jit(lambda last: world.target.graph.merge(world.target.params).model.norm(last))(out.last_hidden)
    states = np.stack([np.asarray(array) for array in (*out.taps.arrays, normed)])
    found = []
    for i, row in enumerate(rows):
        count = len(row["input_ids"])
        found.append(
            {"ids": np.array(row["input_ids"]), "mask": np.array(row["loss_mask"]), "states": states[:, i, :count]}
        )
    return found


def content(document: dict[str, Any], layout: str, states: list[int]) -> dict[str, Any]:
    """A sample in a format's layout; states are the target's taps in the order wanted, the last one the teacher's."""
    common = {"input_ids": document["ids"], "loss_mask": document["mask"]}
    arrays = [document["states"][i] for i in states]
    aux, last = np.concatenate(arrays[:-1], axis=-1), arrays[-1]
    if layout == "v1":
        return common | {"hidden_states": arrays}
    if layout == "v0":
        return common | {"hidden_state": aux, "target": last}
    if layout == "specforge":
        return common | {"hidden_state": last[None], "aux_hidden_state": aux[None]}
    return common | {"hidden_states": last, "aux_hidden_states": aux, "conversation_id": "c"}


def write(folder: Path, documents, layout: str, states: list[int], ending: str = ".pt", **more: Any) -> str:
    for i, document in enumerate(documents):
        write_torch(folder / f"data_{i}{ending}", content(document, layout, states) | more)
    return str(folder)


def write_hs(folder: Path, documents, states: list[int]) -> str:
    folder.mkdir(parents=True)
    for i, document in enumerate(documents):
        arrays = np.stack([document["states"][k] for k in states], axis=1)
        save_file({"token_ids": document["ids"], "hidden_states": arrays}, folder / f"hs_{i}.safetensors")
    return str(folder)


@pytest.fixture
def prepare(world, tmp_path):
    """prepare(train, stored, draft=..., training=...): a prepared run whose held-out data is JSONL."""
    runs = []

    def make(train: str, stored: dict[str, Any], **sections: Any) -> trainer.Run:
        data = {"train": train, "stored": stored}
        config = world.config(tmp_path / "runs", f"run{len(runs)}", data=data, **sections)
        runs.append(trainer.prepare(config, config.run_dir, world.target, None, lambda line: None))
        return runs[-1]

    yield make
    for run in runs:
        run.checkpoints.close()


@pytest.fixture(scope="module")
def online(world, tmp_path_factory):
    """The run that all stored ones are held against, and its outcome on the first two rows."""
    config = world.config(tmp_path_factory.mktemp("online"))
    run = trainer.prepare(config, config.run_dir, world.target, None, lambda line: None)
    yield run, outcome(run)
    run.checkpoints.close()


def outcome(run: trainer.Run):
    batch = make_batch(run.train, [0, 1], 2)
    trainable = {key: value for key, value in run.draft.params.items() if key != "embed_tokens"}
    features = trainer.features_of(run, run.stored, run.cache, [0, 1], batch)
    return evaluate_batch(run.setup, run.frozen, trainable, batch, features)


def assert_same(run: trainer.Run, online) -> None:
    reference, expected = online
    np.testing.assert_array_equal(run.train.input_ids, reference.train.input_ids)
    got = outcome(run)
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-5)
    np.testing.assert_array_equal(got.hits, expected.hits)


# ------------------------------------------------------------------------------------------ the same loss as online


@pytest.mark.parametrize(
    "layout, states, stored",
    [
        ("v1", [1, 2, 4], INPUTS | BEFORE | {"ids": [1, 2, 4]}),
        ("v1", [0, 1, 2, 3, 4], OUTPUTS | BEFORE | {"ids": None}),  # an embedding has no number in these words
        ("v0", [1, 2, 4, 5], INPUTS | AFTER | {"ids": [1, 2, 4]}),
        ("specforge", [1, 2, 4, 5], OUTPUTS | AFTER | {"ids": [0, 1, 3]}),
        ("modelopt", [4, 2, 1, 4], OUTPUTS | BEFORE | {"ids": [3, 1, 0]}),
    ],
    ids=["v1", "v1 all states", "v0", "specforge", "modelopt"],
)
def test_each_format_has_the_loss_of_online_features(prepare, documents, online, tmp_path, layout, states, stored):
    if stored["ids"] is None:
        stored = INPUTS | BEFORE | {"ids": states}
    assert_same(prepare(write(tmp_path / "data", documents, layout, states), stored), online)


def test_gzipped_specforge(prepare, documents, online, tmp_path):
    folder = write(tmp_path / "data" / "rows_0-2000", documents, "specforge", [1, 2, 4, 5], ".ckpt.gz")
    assert_same(prepare(folder, OUTPUTS | AFTER | {"ids": [0, 1, 3]}), online)


def test_hs_files_with_masks_from_jsonl(world, prepare, documents, online, tmp_path):
    folder = write_hs(tmp_path / "data" / "hidden_states", documents, [1, 2, 4])
    stored = INPUTS | BEFORE | {"ids": [1, 2, 4]}
    with pytest.raises(UserError, match="no loss mask .* data.stored.loss_masks"):
        prepare(folder, stored)
    assert_same(prepare(folder, stored | {"loss_masks": world.few}), online)
    with pytest.raises(UserError, match="no row has the"):
        prepare(folder, stored | {"loss_masks": world.heldout})


def test_hs_files_with_the_masks_of_their_dataset(prepare, documents, online, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    write_hs(tmp_path / "data" / "hidden_states", documents, [1, 2, 4])
    table = pyarrow.table({"input_ids": [d["ids"] for d in documents], "loss_mask": [d["mask"] for d in documents]})
    with pyarrow.ipc.new_stream(str(tmp_path / "data" / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "data" / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    stored = INPUTS | BEFORE | {"ids": [1, 2, 4]}
    assert_same(prepare(str(tmp_path / "data" / "hidden_states"), stored), online)


def test_a_whole_run_is_the_run_with_online_features(world, documents, tmp_path):
    """Both train and held-out data stored, and kept in memory after the first epoch."""
    folder = write(tmp_path / "data", documents, "v1", [0, 1, 2, 4])
    stored = {"train": folder, "stored": INPUTS | BEFORE | {"ids": [0, 1, 2, 4]}}
    metrics = {}
    for name, data in (("online", {}), ("ram", stored)):
        data = data | {"heldout": data.get("train", world.few)}
        config = world.config(tmp_path, name, data=data, training={"epochs": 2, "features": name})
        trainer.train(config, target=world.target)
        metrics[name] = read_metrics(config.run_dir)
    for got, expected in zip(metrics["ram"], metrics["online"], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert got["simulated_tau"] == pytest.approx(expected["simulated_tau"], abs=0.05)
        if "heldout" in expected:
            assert got["heldout"]["simulated_tau"] == pytest.approx(expected["heldout"]["simulated_tau"], abs=0.05)
    provenance = json.loads((tmp_path / "ram" / "provenance.json").read_text())
    assert list(provenance["data"]) == [folder]


def test_every_row_holds_the_states_of_its_own_documents(world, prepare, documents, tmp_path):
    run = prepare(write(tmp_path / "data", documents, "v1", [1, 2, 4]), INPUTS | BEFORE | {"ids": [1, 2, 4]})
    for step in range(3):
        rows = rows_of_step(step, len(run.train.input_ids), 2, 0)
        batch = make_batch(run.train, rows, 2)
        expected = compute_features(run.setup, run.frozen, batch)
        padded = rows + [-1] * (2 - len(rows))
        taps, last = run.stored.rows(padded)
        inside = batch.document_ids >= 0
        for got, wanted in zip((*taps.arrays, last.array), (*expected.taps.arrays, expected.last.array), strict=True):
            assert relative(np.asarray(got)[inside], np.asarray(wanted)[inside]) < 1e-5
            assert not np.asarray(got)[~inside].any()


def test_a_normed_last_hidden_is_not_normed_again(world, online):
    run, _ = online
    features = compute_features(run.setup, run.frozen, make_batch(run.train, [0, 1], 2))
    normed = world.target.graph.merge(world.target.params).model.norm(features.last.array)
    twice = features._replace(last=LastHidden(normed, normed=False))
    once = features._replace(last=LastHidden(normed, normed=True))
    made = [teacher(run.setup.target, run.frozen.target, f, run.frozen.d2t).states for f in (features, once, twice)]
    assert relative(made[1], made[0]) < 1e-5 < 1e-2 < relative(made[2], made[0])


def test_feature_loss_needs_the_state_before_the_norm(prepare, documents, tmp_path):
    folder = write(tmp_path / "data", documents, "specforge", [1, 2, 4, 5])
    with pytest.raises(UserError, match="feature_loss"):
        prepare(folder, OUTPUTS | AFTER | {"ids": [0, 1, 3]}, training={"feature_loss": 0.1})


# --------------------------------------------------------------------------------------------- the founding case


def test_a_list_without_the_last_state_is_refused(prepare, documents, tmp_path):
    """[embedding, a, b, c] with c not the last block's output: its last was taken for the teacher's state."""
    folder = write(tmp_path / "data", documents, "v1", [0, 1, 2, 3])
    taps = {"taps": [0, 1, 2]}
    with pytest.raises(WiringError, match="no state is the target's last hidden state"):
        prepare(folder, INPUTS | BEFORE | {"ids": [0, 1, 2, 3]}, draft=taps)
    # Said to be what the server feeds, it is found out against the target.
    with pytest.raises(WiringError, match=r"hidden_states\[0\] was said to be block 1 input.* but is embedding"):
        prepare(folder, INPUTS | BEFORE | {"ids": [1, 2, 3, 4]}, draft={"taps": [1, 2, 3]})


def test_taps_are_taken_by_name_and_not_by_place(prepare, documents, online, tmp_path):
    """The list that broke the founding draft, with the last state added."""
    folder = write(tmp_path / "data", documents, "v1", [0, 1, 2, 4])
    assert_same(prepare(folder, INPUTS | BEFORE | {"ids": [0, 1, 2, 4]}), online)


# ------------------------------------------------------------------------------------- never guessed, never silent


def test_nothing_is_guessed(prepare, documents, tmp_path):
    folder = write(tmp_path / "data", documents, "v1", [1, 2, 4])
    with pytest.raises(UserError) as refused:
        prepare(folder, {})
    text = str(refused.value)
    assert "\n" not in text and "data_0.pt" in text and "3 numbers" in text
    for choice in ("data.stored.ids", "block-input (vLLM", "block-output (SGLang", "pre-norm or post-norm"):
        assert choice in text
    with pytest.raises(UserError) as refused:
        prepare(folder, INPUTS | {"ids": [1, 2, 4]})
    assert "last_hidden" in str(refused.value) and "convention" not in str(refused.value)


@pytest.mark.parametrize(
    "stored, complaint",
    [
        (OUTPUTS | BEFORE | {"ids": [1, 2, 4]}, "tap 5 does not exist"),
        (INPUTS | BEFORE | {"ids": [1, 2]}, "2 ids .* for 3 states .* the last block's output is 4"),
        (INPUTS | BEFORE | {"ids": [0, 2, 4]}, "was said to be embedding .* but is block 1 input"),
        (INPUTS | BEFORE | {"ids": [2, 1, 4]}, "was said to be block 2 input .* but is block 1 input"),
        (INPUTS | AFTER | {"ids": [1, 2, 4]}, "said to be last block output after .* but is .* before the final norm"),
        (INPUTS | BEFORE | {"ids": [1, 1, 4]}, "twice"),
    ],
)
def test_what_is_said_wrong_is_a_wiring_error(prepare, documents, tmp_path, stored, complaint):
    with pytest.raises(WiringError, match=complaint):
        prepare(write(tmp_path / "data", documents[:2], "v1", [1, 2, 4]), stored)


def test_a_norm_said_wrong_is_found_out(prepare, documents, tmp_path):
    for states, said, words in (([1, 2, 4, 5], BEFORE, "after the final norm"), ([1, 2, 4, 4], AFTER, "before the")):
        folder = write(tmp_path / said["last_hidden"], documents[:2], "specforge", states)
        with pytest.raises(WiringError, match=f"hidden_state was said to be .* but is .*{words}"):
            prepare(folder, OUTPUTS | said | {"ids": [0, 1, 3]})


def test_a_file_that_contradicts_the_config(prepare, documents, tmp_path):
    folder = write(tmp_path / "m", documents[:2], "modelopt", [1, 2, 4, 4], hidden_states_prenorm=True)
    with pytest.raises(WiringError, match="last_hidden is post-norm, but hidden_states_prenorm says pre-norm"):
        prepare(folder, OUTPUTS | AFTER | {"ids": [0, 1, 3]})
    prepare(folder, OUTPUTS | {"ids": [0, 1, 3]})  # the file says it
    folder = write(tmp_path / "v1", documents[:2], "v1", [1, 2, 4])
    beside = {"speculators_version": "0.3.0", "hidden_states": {"layer_ids": [3, 0, 1]}}
    (tmp_path / "v1" / "data_config.json").write_text(json.dumps(beside))
    prepare(folder, {})  # everything is in data_config.json, which lists the ids in any order
    with pytest.raises(WiringError, match=r"ids is \[1, 2, 3\], but data_config.json .* says \[0, 1, 3\]"):
        prepare(folder, BEFORE | {"ids": [1, 2, 3]})
    with pytest.raises(WiringError, match="convention is block-input, but data_config.json"):
        prepare(folder, BEFORE | INPUTS)
    with pytest.raises(WiringError, match="last_hidden is post-norm, but data_config.json"):
        prepare(folder, AFTER)
    beside["speculators_version"] = "0.6.0"  # who knows what its numbers mean
    (tmp_path / "v1" / "data_config.json").write_text(json.dumps(beside))
    with pytest.raises(UserError, match="nobody says .* data.stored.convention"):
        prepare(folder, BEFORE)
    (tmp_path / "v1" / "data_config.json").write_text("{}")
    with pytest.raises(UserError, match="data_config.json"):
        prepare(folder, BEFORE)


def test_features_of_another_target_are_refused(prepare, documents, tmp_path):
    other = [
        {**d, "states": np.random.default_rng(0).standard_normal(d["states"].shape).astype("f")} for d in documents
    ]
    stored = INPUTS | BEFORE | {"ids": [1, 2, 4]}
    with pytest.raises(UserError, match="like no state of this target"):
        prepare(write(tmp_path / "a", other[:2], "v1", [1, 2, 4]), stored)
    wide = [{**d, "states": np.concatenate([d["states"]] * 2, axis=-1)} for d in documents]
    with pytest.raises(UserError, match="64 wide, the target 32"):
        prepare(write(tmp_path / "b", wide[:2], "v1", [1, 2, 4]), stored)
    outside = [{**d, "ids": d["ids"] + 48} for d in documents]
    with pytest.raises(UserError, match="outside 0..47"):
        prepare(write(tmp_path / "c", outside[:2], "v1", [1, 2, 4]), stored)
    one = write(tmp_path / "e", [*documents[:4], {**documents[4], "ids": documents[4]["ids"] + 48}], "v1", [1, 2, 4])
    with pytest.raises(UserError, match=r"outside 0..47 / .*data_4\.pt"):  # any file, not only those measured
        prepare(one, stored)
    mixed = write(tmp_path / "d", documents[:2], "v1", [1, 2, 4])
    write_torch(tmp_path / "d" / "data_9.ckpt", content(documents[0], "specforge", [1, 2, 4, 5]))
    with pytest.raises((UserError, WiringError), match="two kinds|ids"):
        prepare(mixed, stored)


def test_a_state_after_the_norm_is_no_tap(prepare, documents, tmp_path):
    folder = write(tmp_path / "data", documents[:2], "v1", [1, 2, 5])
    with pytest.raises(WiringError, match=r"draft.taps are \[1, 2, 4\] .* hold \[1, 2\]"):
        prepare(folder, INPUTS | AFTER | {"ids": [1, 2, 4]})


def test_taps_that_are_not_stored(prepare, documents, tmp_path):
    folder = write(tmp_path / "data", documents[:2], "v1", [1, 2, 4])
    with pytest.raises(WiringError, match=r"draft.taps are \[2, 3, 4\] .* hold \[1, 2, 4\]"):
        prepare(folder, INPUTS | BEFORE | {"ids": [1, 2, 4]}, draft={"taps": [2, 3, 4]})


def test_not_finite_states_are_refused(prepare, documents, tmp_path):
    broken = [{**d, "states": d["states"].copy()} for d in documents[:2]]
    broken[0]["states"][2, 1, 0] = np.nan
    with pytest.raises(UserError, match=r"hidden_states\[1\] holds NaN or infinity .*data_0.pt"):
        prepare(write(tmp_path / "data", broken, "v1", [1, 2, 4]), INPUTS | BEFORE | {"ids": [1, 2, 4]})


def test_jsonl_and_stored_features_do_not_mix(world, prepare, documents, tmp_path):
    folder = write(tmp_path / "data", documents[:2], "v1", [1, 2, 4])
    with pytest.raises(UserError, match="in one list"):
        prepare([folder, world.few], INPUTS | BEFORE | {"ids": [1, 2, 4]})


def test_half_precision_is_read_into_the_targets_dtype(prepare, documents, tmp_path):
    half = [{**d, "states": d["states"].astype(ml_dtypes.bfloat16)} for d in documents[:2]]
    run = prepare(write(tmp_path / "data", half, "v1", [1, 2, 4]), INPUTS | BEFORE | {"ids": [1, 2, 4]})
    taps, last = run.stored.rows([0, -1])
    assert {str(a.dtype) for a in (*taps.arrays, last.array)} == {"float32"}
    assert foreign.open_sample(tmp_path / "data" / "data_0.pt").states()[0].dtype == ml_dtypes.bfloat16
