"""Trackio: local dashboards with the interface of wandb. `trackio show` opens them."""

import trackio

from eagle3_jax.config import Config


class Trackio:
    def __init__(self, config: Config, step: int):
        trackio.init(
            project=config.tracking.project,
            name=config.name,
            config=config.model_dump(mode="json"),
            resume="allow" if step else "never",  # another run of the same name is another one there too
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        trackio.log(values, step=step)

    def close(self) -> None:
        trackio.finish()
