"""One mesh for target and draft: eight devices in two processes train what one device trains, and it goes on there."""

import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from flax import nnx
from jax.sharding import PartitionSpec

from eagle3_jax import sharding
from eagle3_jax.errors import UserError
from eagle3_jax.models.families import family_of
from eagle3_jax.models.weights import abstract_params
from eagle3_jax.sharding import PARAMETERS, make_mesh, shared, spec
from eagle3_jax.training import run_folder, trainer
from tests.training.conftest import read_metrics

REPO = Path(__file__).resolve().parents[2]
GOLDEN = REPO / "tests" / "golden" / "targets"


def test_where_weights_go() -> None:
    mesh = {"data": 2, "fsdp": 2, "tensor": 4}
    assert spec(mesh, "q_proj", (64, 32)) == PartitionSpec(("tensor",), ("fsdp",))
    assert spec(mesh, "o_proj", (32, 64)) == PartitionSpec(("fsdp",), ("tensor",))
    assert spec(mesh, "lm_head", (51, 32)) == PartitionSpec(None, ("fsdp",))  # 51 rows do not divide
    assert spec(mesh, "gate_proj", (3, 64, 32)) == PartitionSpec(None, ("tensor",), ("fsdp",))  # of three experts
    assert spec(mesh, "q_a_proj", (64, 32)) == PartitionSpec(None, ("fsdp",))
    assert spec(mesh, "kv_b_proj", (64, 32)) == PartitionSpec(("tensor",), ("fsdp",))
    assert spec(mesh, "norm", (32,)) == spec(mesh, "q_proj", (64,)) == PartitionSpec()


def test_every_matrix_has_a_place(world, tmp_path) -> None:
    config = world.config(tmp_path)
    run = trainer.prepare(config, config.run_dir, world.target, None, lambda line: None)
    run.checkpoints.close()
    for tree in (run.frozen.target, run.draft.params):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            assert leaf.ndim < 2 or path[-2].key in PARAMETERS, path


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("*_tiny")), ids=lambda folder: folder.name)
def test_every_matrix_of_every_family_has_a_place(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    family = family_of(raw, "here")
    _, shapes = abstract_params(nnx.eval_shape(lambda: family.build(family.read(raw, "here"))))
    for name, shape in shapes.items():
        assert len(shape) < 2 or name.endswith(".bias") or name.split(".")[-2] in PARAMETERS, name


def test_mistakes_are_one_line(world, tmp_path) -> None:
    with pytest.raises(UserError, match="mesh of 1 x 2 x 1 .data, fsdp, tensor. for 1 devices"):
        trainer.train(world.config(tmp_path).model_copy(update={"mesh": _mesh(fsdp=2)}), target=world.target)
    assert make_mesh(None, 1, 1) is None


def test_work_is_shared_and_its_results_come_back_in_order(monkeypatch) -> None:
    """Two threads as two processes, which meet where processes would exchange bytes."""
    said, meeting, here = [b"", b""], threading.Barrier(2, timeout=60), threading.local()

    def exchange(own: bytes) -> list[bytes]:
        said[here.index] = own
        meeting.wait()
        return list(said)

    monkeypatch.setattr(sharding, "_from_all", exchange)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: here.index)

    def process(index: int, items: list[str]) -> tuple[list[str], list[str]]:
        here.index, done = index, []
        return shared(lambda item: done.append(item) or item.upper(), items, "letters"), done

    with ThreadPoolExecutor(2) as both:
        assert list(both.map(process, (0, 1), [list("abcde")] * 2)) == [
            (list("ABCDE"), list("ace")),
            (list("ABCDE"), list("bd")),
        ]
        for running in [both.submit(process, 0, list("abc")), both.submit(process, 1, list("abd"))]:
            with pytest.raises(UserError, match="processes 0 and 1 do not read the same / letters"):
                running.result()


def _mesh(**sizes):
    from eagle3_jax.config import MeshConfig

    return MeshConfig(**sizes)


@pytest.mark.slow
def test_eight_devices_in_two_processes_are_one_device(world, tmp_path) -> None:
    """Two processes of four devices, over gloo: data 2 x fsdp 2 x tensor 2. They stop after half of the run; one
    device goes on. The losses are those of one device all the way, to float32 tolerance."""
    refused = tmp_path / "refused.jsonl"
    refused.write_text('{"input_ids": [99], "loss_mask": [1]}\n')
    sections = {"training": {"batch_rows": 4, "epochs": 2, "evaluate_every": 2, "checkpoint_every": 2}}
    sections["data"] = {"train": [str(refused), world.few]}
    alone, shared = world.config(tmp_path, "alone", **sections), world.config(tmp_path, "shared", **sections)
    trainer.train(alone, target=world.target)
    expected = read_metrics(alone.run_dir)
    codes, said = two_processes(STOP_AFTER_TWO, shared, tmp_path, 4, "mesh.fsdp=2", "mesh.tensor=2")
    assert codes == [130, 130], said
    assert "stopped at step 2 of 4" in said[0]
    # Of 17 and 8 records each process has tokenised its half.
    assert "tokenised 13" in said[0] and "tokenised 12" in said[1] and "1 rows refused" in said[0]
    config = yaml.safe_load((shared.run_dir / "config.yaml").read_text())
    assert config["mesh"] == {"data": None, "fsdp": 2, "tensor": 2}
    said = []
    trainer.train(shared, resume=True, target=world.target, say=said.append)
    assert "resuming at step 2 of 4" in said
    got = read_metrics(shared.run_dir)
    assert [row["step"] for row in got] == [1, 2, 3, 4]
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine["loss_by_step"], theirs["loss_by_step"], rtol=2e-4)
        np.testing.assert_allclose(mine["grad_norm"], theirs["grad_norm"], rtol=2e-3)
        if "heldout" in theirs:
            np.testing.assert_allclose(
                mine["heldout"]["loss_first_step"], theirs["heldout"]["loss_first_step"], rtol=2e-4
            )


@pytest.mark.slow
def test_two_processes_keep_to_one_clock_and_one_of_them_generates(world, tmp_path) -> None:
    """Features in memory over two passes, a time budget, and answers at the end are those of one process."""
    training = {"batch_rows": 4, "epochs": 2, "evaluate_every": 2, "features": "ram", "minutes": 60.0}
    sections = {"training": training, "evaluation": {"count": 2, "max_new_tokens": 12, "strategy": "chain:2"}}
    alone, shared = world.config(tmp_path, "alone", **sections), world.config(tmp_path, "shared", **sections)
    expected = trainer.train(alone, target=world.target)
    codes, said = two_processes(A_FAST_CLOCK, shared, tmp_path, 1)
    assert codes == [0, 0], said
    got = run_folder.read_result(shared.run_dir)
    assert got["total_steps"] == expected["total_steps"] == 4 and got["generation"] == expected["generation"]
    for mine, theirs in zip(read_metrics(shared.run_dir), read_metrics(alone.run_dir), strict=True):
        np.testing.assert_allclose(mine["loss_by_step"], theirs["loss_by_step"], rtol=2e-4)


def two_processes(program: str, config, folder: Path, devices: int, *overrides: str) -> tuple[list[int], list[str]]:
    """Runs `program` as two processes of so many devices; their exit statuses and what they wrote to stderr."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(run_folder.plain(config)))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    command = [sys.executable, "-c", program, "train", "--config", file, *overrides]
    command += ["--coordinator", address, "--processes", "2", "--process"]
    processes = [
        subprocess.Popen([*command, str(i)], env=environment, cwd=REPO, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    said = [process.communicate(timeout=600)[1] for process in processes]
    return [process.returncode for process in processes], said


# By the clock of the second process the time is up at once.
A_FAST_CLOCK = """
import sys, time
from types import SimpleNamespace
from eagle3_jax.cli.main import main
from eagle3_jax.training import trainer
import jax
trainer.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() * (1 + 1e6 * jax.process_index()))
sys.exit(main(sys.argv[1:]))
"""

# SIGTERM reaches the second process only; both save and stop.
STOP_AFTER_TWO = """
import os, signal, sys
from eagle3_jax.cli.main import main
from eagle3_jax.training import dataset, trainer
import jax
make_batch, calls, tokenise, records = trainer.make_batch, [], dataset.tokenise, []
def counted(*arguments):
    calls.append(0)
    if len(calls) == 2 and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return make_batch(*arguments)
trainer.make_batch = counted
dataset.tokenise = lambda *arguments: records.append(0) or tokenise(*arguments)
code = main(sys.argv[1:])
print("tokenised", len(records), file=sys.stderr)
sys.exit(code)
"""
