"""A small world to train in: a random target, its own greedy answers as training data, and one finished run."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.config import Config
from eagle3_jax.training import prepare, trainer
from tests.tiny import target_config, target_tensors, write_target

ANSWER, BEYOND = 24, 6  # tokens that generate is asked for, and those known after them: the deepest chain is 5
PROMPTS, DEEPEST = 8, 5  # what generate is asked for with a draft: equal shapes share their compiled programs
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@dataclass(frozen=True)
class World:
    """train: 32 documents; few: 8 of them; heldout: 8 others. prompts and answers are those of train, then heldout."""

    folder: Path
    target: e3.Target
    prompts: list[list[int]]
    answers: list[list[int]]
    train: str
    few: str
    heldout: str

    def config(self, runs_dir: Path, name: str = "run", **sections: dict[str, Any]) -> Config:
        """A float32 config of 4 steps an epoch on the few documents; sections replace single values."""
        raw: dict[str, Any] = {
            "target": {"path": str(self.folder), "dtype": "float32"},
            "data": {"train": self.few, "heldout": self.heldout, "length": 96},
            "draft": {"taps": [1, 2, 4], "vocab_size": 40},
            "optimiser": {"learning_rate": 1e-2},
            "training": {
                "epochs": 3,
                "batch_rows": 2,
                "ttt_steps": 2,
                "evaluate_steps": 3,
                "compute_dtype": "float32",
                "target_hub_id": "someone/tiny",
                "evaluate_every": 2,
                "checkpoint_every": 4,
            },
            "evaluation": {"count": 0},  # it compiles generation; tests of it switch it on
        }
        for section, values in sections.items():
            raw[section] = raw.get(section, {}) | values
        return Config.model_validate(raw | {"name": name, "runs_dir": str(runs_dir)})


def write_rows(path: Path, rows: list[tuple[list[int], list[int]]]) -> str:
    """Rows of (prompt, answer) as input_ids and a mask over the answer; returns the path."""
    lines = [{"input_ids": p + a, "loss_mask": [0] * len(p) + [1] * len(a)} for p, a in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    # Twice the usual weights: the greedy answers of a weaker target repeat one token for ever.
    tensors = {
        name: array * (2 if array.ndim == 2 and "embed" not in name else 1)
        for name, array in target_tensors(target_config(**SHAPE)).items()
    }
    folder = write_target(root / "target", tensors=tensors, **SHAPE)
    target = e3.load_target(folder, "float32")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 48, size).tolist() for size in rng.integers(3, 10, 40)]
    results = e3.generate(target, None, prompts, ANSWER + BEYOND, stop_token_ids=())
    answers = [result.tokens for result in results]
    rows = list(zip(prompts, answers, strict=True))
    files = {"train": rows[:32], "few": rows[:16], "heldout": rows[32:]}
    paths = {name: write_rows(root / f"{name}.jsonl", part) for name, part in files.items()}
    return World(folder, target, prompts, answers, **paths)


@pytest.fixture(scope="session", autouse=True)
def one_optimiser_a_config():
    """Optimisers are part of the jit key: equal ones let all runs share their compiled steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "make_optimiser", functools.lru_cache(prepare.make_optimiser))
        yield


@pytest.fixture(scope="session")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of 96 steps on the 32 documents; its draft is right about a third of the time."""
    training = {"epochs": 12, "evaluate_every": 32, "checkpoint_every": 48}
    config = world.config(tmp_path_factory.mktemp("trained"), data={"train": world.train}, training=training)
    trainer.train(config, target=world.target)
    return config.run_dir
