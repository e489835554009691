"""Weights & Biases: needs `wandb login`, or WANDB_MODE=offline."""

import wandb

from eagle3_jax.config import Config


class WeightsAndBiases:
    def __init__(self, config: Config, step: int):
        self._run = wandb.init(
            project=config.tracking.project,
            name=config.name,
            config=config.model_dump(mode="json"),
            dir=str(config.run_dir),
            id=config.name,
            resume="allow",
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
