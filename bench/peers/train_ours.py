"""Our trainer, `eagle3_jax.training.trainer.train` as train.py calls it, taking turns: `train_ours.py JOB.json`.

Options: dtype (of the target and of computing), row (tokens of a packed row; a step has as many tokens in any case).
"""

import json
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a checkout need not be installed

from bench.peers.turns import Turns  # noqa: E402


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "optax")}
    turns = Turns(job["turn_tokens"], job["warm_up"], {"versions": versions})

    from eagle3_jax.cli.common import note, start_jax
    from eagle3_jax.config import Config
    from eagle3_jax.training.trainer import train

    inputs, dtype, row = job["inputs"], job["options"]["dtype"], int(job["options"]["row"])
    config = Config.model_validate(
        {
            "name": "peers",
            "runs_dir": job["scratch"],
            "target": {"path": job["target"], "dtype": dtype},
            "data": {
                "train": f"{inputs}/train.jsonl",
                "heldout": f"{inputs}/heldout.jsonl",
                "length": row,
            },
            "draft": {"vocab_size": job["vocabulary"]},
            "optimiser": {"name": "adamw", "clip": 1.0, "weight_decay": 0.01},
            "training": {
                "epochs": 1000,
                "batch_rows": job["rows"] * job["length"] // row,
                "ttt_steps": job["ttt_steps"],
                "train_head": False,
                "compute_dtype": dtype,
                "evaluate_every": 1_000_000,
                "checkpoint_every": 1_000_000,
            },
        }
    )
    start_jax(dtype)
    train(config, progress=lambda report: turns.step(report.metrics["tokens"], report.metrics["wait"]), say=note)


if __name__ == "__main__":
    main()
