"""TensorBoard: event files in the run folder. `tensorboard --logdir runs` shows them."""

from tensorboardX import SummaryWriter

from eagle3_jax.config import Config


class TensorBoard:
    def __init__(self, config: Config, step: int):
        # What an interrupted run wrote after the restored step is hidden.
        self._writer = SummaryWriter(str(config.run_dir / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
