"""Weights & Biases: needs `wandb login`, or WANDB_MODE=offline."""

import wandb

from eagle3_jax.config import Config
from eagle3_jax.training.run_folder import write_text


class WeightsAndBiases:
    def __init__(self, config: Config, step: int):
        # The service knows runs by an id; another run of the same name is another one there too.
        known = config.run_dir / "wandb_id.txt"
        going_on = step > 0 and known.exists()
        self._run = wandb.init(
            project=config.tracking.project,
            name=config.name,
            config=config.model_dump(mode="json"),
            dir=str(config.run_dir),
            id=known.read_text(encoding="utf-8").strip() if going_on else None,
            resume="allow" if going_on else None,
        )
        if not going_on:
            write_text(known, f"{self._run.id}\n")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
