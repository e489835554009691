"""One way to wire a draft to its target: everything that two systems can disagree on while all shapes agree."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from eagle3_jax.draft.config import DraftConfig

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

# What the draft's tokens are compared with: the target's choice, and two wrong ones that training code has used.
TEACHERS = ("final norm", "no final norm", "final norm twice")

# How the stored vocabulary map d2t is read; the first is the ecosystem's meaning.
MAPS = {
    "offsets": "target id = draft id + d2t[draft id]",
    "absolute": "d2t holds target ids, not offsets",
    "t2d": "the ids that t2d marks, ascending",
    "offsets of offsets": "arange was subtracted twice when d2t was saved",
    "none": "draft ids are target ids 0, 1, 2, ...",
}


@dataclass(frozen=True)
class Wiring:
    """config: taps (canonical, in order), norm flags and rope, as a config.json states them.

    last_normed: the tap N that fc reads is after the final norm, which no config can say. d2t: a key of MAPS.
    teacher: one of TEACHERS, what the draft was trained to predict; serving always compares with the first.
    """

    config: DraftConfig
    last_normed: bool = False
    d2t: str = "offsets"
    teacher: str = TEACHERS[0]

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps.points

    def changes(self, declared: "Wiring") -> list[str]:
        """Names of what differs from `declared`; the shorter, the simpler the explanation."""
        ours, theirs = self.config, declared.config
        names = ["taps"] * (ours.taps != theirs.taps)
        names += ["norm of the last tap"] * (self.last_normed != declared.last_normed)
        # The two norms before fc are one choice of three.
        before = [(c.norm_before_fc, c.fc_norm) for c in (ours, theirs)]
        names += ["norm before fc"] * (before[0] != before[1])
        names += [f for f in ("norm_before_residual", "norm_output") if getattr(ours, f) != getattr(theirs, f)]
        names += ["rope"] * (ours.decoder.rope != theirs.decoder.rope)
        return names + [name for name in ("d2t", "teacher") if getattr(self, name) != getattr(declared, name)]

    def taps_in_words(self, num_layers: int) -> str:
        words = self.config.taps.words(num_layers)
        after, before = "last block output after the final norm", "last block output before the final norm"
        return words.replace(before, after) if self.last_normed else words

    def words(self, declared: "Wiring", num_layers: int) -> str:
        """The taps, and whatever else differs from the declared wiring."""
        parts = [self.taps_in_words(num_layers)]
        for name in self.changes(declared):
            if name == "norm before fc":
                parts.append(_norm_before_fc(self.config))
            elif name in ("norm_before_residual", "norm_output"):
                parts.append(f"{name} {'on' if getattr(self.config, name) else 'off'}")
            elif name == "rope":
                parts.append(_rope(self.config))
            elif name == "d2t":
                parts.append(f"d2t read as {self.d2t!r}")
            elif name == "teacher":
                parts.append(f"teacher with {self.teacher}")
        return " + ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Taps in canonical numbering; flags and rope under their names in config.json."""
        return {
            "taps": list(self.taps),
            "last_tap_after_final_norm": self.last_normed,
            **{flag: getattr(self.config, flag) for flag in FLAGS},
            "rope_parameters": self.config.decoder.rope.to_hf(),
            "d2t": self.d2t,
            "teacher": self.teacher,
        }


def with_config(wiring: Wiring, **changes: Any) -> Wiring:
    return dataclasses.replace(wiring, config=dataclasses.replace(wiring.config, **changes))


def with_rope(wiring: Wiring, rope) -> Wiring:
    return with_config(wiring, decoder=dataclasses.replace(wiring.config.decoder, rope=rope))


def _norm_before_fc(config: DraftConfig) -> str:
    if config.norm_before_fc:
        return "norm_before_fc on"
    return "fc_norm on" if config.fc_norm else "no norm before fc"


def _rope(config: DraftConfig) -> str:
    rope = config.decoder.rope
    return f"rope theta {rope.theta:g}" + ("" if rope.kind == "default" else f" ({rope.kind})")
