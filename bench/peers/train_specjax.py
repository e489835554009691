"""SpecJAX's trainer (JAX), taking turns: `train_specjax.py JOB.json`, in its environment, from a checkout of it.

`specjax.train.train` runs as it is: its online teacher, its TTT loss, its optimiser. Given from outside are what it
would read from text, rows of token ids (full ones, so that it pays for no padding) and the draft vocabulary, and the
vocabulary's size, which it has no option for. It has no loss mask: all tokens are supervised, which costs it nothing.
Option: dtype. It keeps everything in bf16; float32 converts target and draft after loading.
"""

import argparse
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.peers.turns import Turns  # noqa: E402


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    versions = {"specjax": job["commit"][:12]} | {name: metadata.version(name) for name in ("jax", "optax")}
    turns = Turns(job["turn_tokens"], job["warm_up"], {"versions": versions})
    os.environ.update({"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"})
    sys.path.insert(0, job["source"])

    import jax
    import numpy as np
    from specjax import train

    dtype = job["options"]["dtype"]
    rows = np.load(f"{job['inputs']}/rows.npz")
    tokens = job["rows"] * job["length"]

    class Rows:
        """Packed rows in place of the tokenised conversations."""

        def __init__(self, *_, **__):
            self.bucket_lengths = [job["length"]] * len(rows["ids"])

        def __len__(self):
            return len(self.bucket_lengths)

        def __getitem__(self, index: int):
            return rows["ids"][index], np.ones(job["length"], np.int32)

    def convert(params: dict) -> dict:
        return params if dtype == "bfloat16" else {name: array.astype(dtype) for name, array in params.items()}

    def wrap(name: str, change) -> None:
        """Replaces a function of their module by `change` of its result."""
        original = getattr(train, name)
        setattr(train, name, lambda *args, **kwargs: change(original(*args, **kwargs)))

    def draft_config(config):
        config.draft_vocab_size = job["vocabulary"]
        return config

    def target(found):
        load, forward = found

        def load_converted(*args, **kwargs):
            params, config = load(*args, **kwargs)
            return convert(params), config

        return load_converted, forward

    def counted(step):
        """Their jitted step. When it is called again, the optimiser, which runs between, has finished a step."""
        calls = 0

        def call(params, *rest):
            nonlocal calls
            if calls:
                jax.block_until_ready(params)
                turns.step(tokens)
            calls += 1
            return step(params, *rest)

        return call

    train.Eagle3Dataset = Rows
    train.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: None)
    train.build_d2t_from_data = lambda *_, **__: np.load(f"{job['inputs']}/vocabulary.npy").astype(np.int64)
    wrap("_eagle3_config_from_target", draft_config)
    wrap("get_target", target)
    wrap("load_eagle3_params", lambda found: (convert(found[0]), *found[1:]))
    wrap("make_train_step_ttt", counted)
    train.train(
        argparse.Namespace(
            target_model_path=job["target"],
            target_model_type="llama",
            draft_init_path=None,
            data_path="",
            output_dir=f"{job['scratch']}/checkpoints",
            exp_name="peers",
            num_epochs=1000,
            learning_rate=1e-4,
            max_length=job["length"],
            warmup_ratio=0.03,
            batch_size=job["rows"],
            grad_accum_steps=1,
            log_every=10,
            save_every=0,
            max_steps=None,
            ttt_length=job["ttt_steps"],
            tp=1,
            wandb_project=None,
            wandb_run_name=None,
        )
    )


if __name__ == "__main__":
    main()
