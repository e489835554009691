"""Target and draft over several devices: the same tokens as on one, caches by heads, nothing compiled twice; loading
part by part. One process with eight devices computes for all tests (`run_on_mesh.py`)."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from eagle3_jax.errors import UserError
from eagle3_jax.sharding import ONE_DEVICE, Placement, parse_mesh
from tests.processes import environment

REPO = Path(__file__).resolve().parents[2]


def run_on_mesh(part: str, folder: Path) -> dict:
    command = [sys.executable, "-W", "error", "-m", "tests.speculate.run_on_mesh", part, folder]
    variables = environment() | {"JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return run_on_mesh("quick", tmp_path_factory.mktemp("mesh"))


def check_pair(pair: dict) -> None:
    assert pair["same"], pair
    assert pair["compiled"] == 0 and pair["shardings_kept"] and pair["donated"]


def test_tokens_and_rounds_are_those_of_one_device(found) -> None:
    check_pair(found["pair"])
    assert found["pair"]["cache"] == [None, "tensor"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc to read the memory from")
def test_loading_onto_a_mesh_needs_less_than_one_shard_beside_the_parts(found) -> None:
    loading = found["loading"]
    assert loading["parameters"] > 1.4 * loading["shard"]  # three shards in bfloat16
    assert loading["highest"] - loading["before"] - loading["parameters"] < 1.1 * loading["shard"]
    assert loading["largest_part"] == loading["largest"] / 4 and loading["last_expert"] == 2


@pytest.mark.slow
def test_every_strategy_uneven_heads_an_engine_and_commands(tmp_path) -> None:
    found = run_on_mesh("all", tmp_path)
    for pair in found["pairs"].values():
        check_pair(pair)
    assert found["pairs"]["tensor=4"]["cache"] == []  # two key/value heads
    assert found["engine"] == {"same": True, "compiled": 0}
    assert found["commands"] == {"rows": True, "doctor": True, "codes": [0, 0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor=3", "it needs 3 devices, this machine has 1 .cpu."),
        ("data=2,tensor=4", "data is for training / start one process for each copy"),
        ("heads=2", "heads=2 is no axis with a size / give it as tensor=4"),
        ("tensor=0", "no axis with a size"),
        ("", "nothing is no axis"),
    ],
)
def test_mistakes_are_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_mesh(text)
    assert "\n" not in str(caught.value)


def test_one_device_is_no_mesh() -> None:
    assert parse_mesh("tensor=1, fsdp=1") is None and ONE_DEVICE.words is None
    with pytest.raises(UserError, match="axes"):
        Placement(jax.sharding.Mesh(jax.devices(), ("x",)))


def test_heads_that_do_not_divide_are_said(found) -> None:
    assert found["words"] == "fsdp=2,tensor=2" and found["even"] is None
    assert "the target has 9 query and 3 key/value heads, which do not divide over tensor=2" in found["uneven"]
