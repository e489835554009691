"""Which points of the residual stream the states of a stored sample are: said by the file or by the config.

Two things decide and neither is guessed: the ids with their convention, and whether the last hidden state is before or
after the final norm. What is said twice must agree; what nobody says is asked for, with the choices. Translation to
canonical taps happens here, and `identify.py` then holds the result against the target itself.
"""

from dataclasses import dataclass

from eagle3_jax.config import StoredConfig
from eagle3_jax.data.foreign.sample import Sample
from eagle3_jax.errors import UserError
from eagle3_jax.taps import TapSet, WiringError, from_block_outputs

CONVENTIONS = {
    "block-input": "vLLM and speculators 0.5 or later",
    "block-output": "SGLang, SpecForge, ModelOpt, and the generator of speculators 0.3 and 0.4",
}


@dataclass(frozen=True)
class StateMap:
    """points: the canonical tap of each stored state, in the file's order; teacher: the place of the last hidden state
    among them; normed: whether that one is after the final norm."""

    points: tuple[int, ...]
    teacher: int
    normed: bool

    def place(self, tap: int) -> int | None:
        """Where a tap lies among the states; None if it is not stored. A state after the final norm is no tap."""
        places = [i for i, p in enumerate(self.points) if p == tap and not (self.normed and i == self.teacher)]
        return places[0] if places else None

    def taps(self) -> list[int]:
        """All taps that are stored, in the file's order."""
        return list(dict.fromkeys(p for p in self.points if self.place(p) is not None))

    def require(self, wanted: TapSet, num_layers: int, where: str) -> None:
        """Raises WiringError unless every wanted tap is stored."""
        if all(self.place(tap) is not None for tap in wanted):
            return
        stored = self.taps()
        words = TapSet(stored).words(num_layers) if stored else "none"
        raise WiringError(
            f"draft.taps are {list(wanted)} = {wanted.words(num_layers)}, the stored features hold {stored} = {words} "
            f"/ {where} / set draft.taps to stored ones or make the features again"
        )


def state_map(sample: Sample, config: StoredConfig, num_layers: int) -> StateMap:
    """Settles what the states of a sample are, for a target of `num_layers` blocks.

    Raises UserError where nobody says (listing the choices) and WiringError where file and config disagree, where the
    ids do not count as many as the states, or where no state is the last hidden state.
    """
    told = None if config.ids is None else tuple(config.ids)
    ids = _agreed("ids", told, sample.says.ids, sample)
    convention = _agreed("convention", config.convention, sample.says.convention, sample)
    last = _agreed("last_hidden", config.last_hidden, sample.says.last_hidden, sample)
    missing = [key for key, value in zip(_KEYS, (ids, convention, last), strict=True) if value is None]
    if missing:
        raise UserError(_question(sample, missing, num_layers))
    named = len(sample.state_names) - sample.last_is_named
    if len(ids) != named:
        raise WiringError(
            f"{len(ids)} ids {list(ids)} for {named} states {', '.join(sample.state_names[:named])} / {sample.path} / "
            "data.stored.ids: one for each, in the file's order"
            + (f"; the last block's output is {_last_id(convention, num_layers)}" if not sample.last_is_named else "")
        )
    points = ()
    if ids:
        tap_set = TapSet(ids) if convention == "block-input" else from_block_outputs(ids)
        points = tap_set.check(num_layers).points
    if sample.last_is_named:
        return StateMap((*points, num_layers), len(points), last == "post-norm")
    if num_layers not in points:
        raise WiringError(
            f"no state is the target's last hidden state: ids {list(ids)} ({convention}) are "
            f"{TapSet(points).words(num_layers)}, and the teacher's logits need the output of the last block "
            f"({_last_id(convention, num_layers)} in these words) / {sample.path} / make the features again with it"
        )
    return StateMap(points, points.index(num_layers), last == "post-norm")


_KEYS = ("ids", "convention", "last_hidden")


def _agreed(key: str, config, file, sample: Sample):
    if config is not None and file is not None and config != file:
        show = list(config) if isinstance(config, tuple) else config
        other = list(file) if isinstance(file, tuple) else file
        raise WiringError(f"data.stored.{key} is {show}, but {sample.says.where} says {other} / {sample.path}")
    return file if config is None else config


def _last_id(convention: str, num_layers: int) -> int:
    return num_layers if convention == "block-input" else num_layers - 1


def _question(sample: Sample, missing: list[str], num_layers: int) -> str:
    """The one line that asks for what nobody says."""
    inputs = [2, num_layers // 2, num_layers - 3] + [num_layers] * (not sample.last_is_named)
    likely = f"often {inputs} in block-input or {[i - 1 for i in inputs]} in block-output, but only who made them knows"
    states = len(sample.state_names) - sample.last_is_named
    choices = {
        "ids": f"data.stored.ids = {states} numbers, one a state in the file's order ({likely})",
        "convention": "data.stored.convention = " + " or ".join(f"{name} ({who})" for name, who in CONVENTIONS.items()),
        "last_hidden": "data.stored.last_hidden = pre-norm or post-norm (before or after the target's final norm)",
    }
    return (
        f"nobody says what the {len(sample.state_names)} states are / {sample.path}, {sample.format} / set "
        + "; ".join(choices[key] for key in missing)
        + "; `eagle3 data inspect FILE --target TARGET` measures it"
    )
