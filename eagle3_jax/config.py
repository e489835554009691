"""Training configs: typed, strict YAML with `a.b=c` overrides. An unknown key is an error naming the nearest one."""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3_jax.errors import UserError

Positive = Annotated[int, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TargetConfig(_Strict):
    """path: HF folder, .gguf file, hub name, or `demo` (the bundled SmolLM2)."""

    path: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class StoredConfig(_Strict):
    """What the states in files of stored features are (data.foreign): needed where the files do not say, never guessed.

    ids: one number a state, in the order of the file; only a state that is the last hidden state by its name in the
    file has none. convention: what a number k means, `block-input` (input of block k: vLLM, speculators 0.5 and later,
    and this project) or `block-output` (output of block k: SGLang, SpecForge, ModelOpt, speculators 0.3 and 0.4).
    last_hidden: whether the last hidden state is before (`pre-norm`) or after (`post-norm`) the final norm.
    loss_masks: JSONL of {input_ids, loss_mask}, or a Hugging Face dataset folder, for files without masks of their own.
    """

    ids: list[Annotated[int, Field(ge=0)]] | None = None
    convention: Literal["block-input", "block-output"] | None = None
    last_hidden: Literal["pre-norm", "post-norm"] | None = None
    loss_masks: str | None = None


class DataConfig(_Strict):
    """train, heldout: JSONL (.gz), JSON or Parquet files, or `hf:NAME:SPLIT` of the hub, whose rows are conversations,
    {input_ids, loss_mask}, or text (docs/training.md); or stored features of others (folders or files; StoredConfig).

    length: tokens of a packed row. overlong: longer documents are cut there, or left out. duplicates: documents that
    occur twice are kept (and counted), or left out. last_turn_only: supervise only the last answer of a conversation.
    chat_template: variables for the target's chat template, such as {enable_thinking: false}; serve with the same.
    """

    train: str | list[str]
    heldout: str | list[str]
    length: Annotated[int, Field(ge=8)] = 2048
    overlong: Literal["cut", "drop"] = "cut"
    duplicates: Literal["keep", "drop"] = "keep"
    last_turn_only: bool = False
    chat_template: dict[str, str | bool | int | float] = {}
    stored: StoredConfig = StoredConfig()


class DraftShape(_Strict):
    """taps: canonical points, or `paper` for (2, N//2, N-3). vocab_size: rows of the draft's head.

    initialise: `random`, or `last_block`: blocks start as copies of the target's last one and fc passes the last tap
    through, so that training begins from the target's own final computation. last_tap_scale: times this. With fc_norm
    the last tap comes with a root mean square of 1, far less than the block is used to; without, 1 keeps its size.
    """

    taps: Literal["paper"] | list[int] = "paper"
    vocab_size: Positive = 32000
    num_layers: Positive = 1
    intermediate_size: Positive | None = None
    initialise: Literal["random", "last_block"] = "random"
    last_tap_scale: Annotated[float, Field(gt=0)] = 1.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class OptimiserConfig(_Strict):
    """AdamW on everything, or Muon on the matrices of the draft's blocks and AdamW on the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    muon_learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.015
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 0.5


class TrainingConfig(_Strict):
    """ttt_steps: unrolled draft steps. batch_rows: packed rows an optimiser step. features: see training.features; with
    stored features `online` reads the files at each step.

    train_head: the draft's head starts as the target's rows; false keeps it so (speculators since 0.5), which
    generalises better from little data.
    feature_loss: weight of the distance between the draft's output and the target's last hidden state one token on.
    EAGLE-3 trains without it (0); with little data it helps (docs/experiments.md).
    target_hub_id: the name under which servers load the target, where the path is no hub name (a GGUF, a local copy).
    minutes: None, or a budget of training time: as many rows take part as it has room for in all `epochs` passes.
    """

    epochs: Positive = 10
    minutes: Annotated[float, Field(gt=0)] | None = None
    batch_rows: Positive = 8
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 3
    step_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    train_head: bool = True
    feature_loss: Annotated[float, Field(ge=0)] = 0.0
    features: Literal["online", "ram"] = "online"
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    target_hub_id: str | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    checkpoint_every: Positive = 200
    evaluate_every: Positive = 100
    evaluate_steps: Annotated[int, Field(ge=1, le=16)] = 5


class Config(_Strict):
    """One training run, written to runs_dir/name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    runs_dir: str = "runs"
    target: TargetConfig
    data: DataConfig
    draft: DraftShape = DraftShape()
    optimiser: OptimiserConfig = OptimiserConfig()
    training: TrainingConfig = TrainingConfig()

    @model_validator(mode="after")
    def _one_pre_norm(self):
        if self.draft.norm_before_fc and self.draft.fc_norm:
            raise ValueError("draft.norm_before_fc and draft.fc_norm are both on; choose one")
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a YAML config and applies `a.b=c` overrides (values in YAML syntax). Raises UserError on any fault."""
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the config / {path} / {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text (byte {error.start}) / {path} / save the config as UTF-8") from error
    except yaml.YAMLError as error:
        raise UserError(f"not valid YAML / {path} / {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise UserError(f"the config is empty or no mapping / {path} / see configs/ for examples")
    for override in overrides:
        _override(raw, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{_first_fault(error)} / {path}") from error


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form a.b=c")
    *path, last = key.split(".")
    for part in path:
        raw = raw.setdefault(part, {})
        if not isinstance(raw, dict):
            raise UserError(f"override {override!r}: {part} is a value, not a section")
    try:
        raw[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML") from error


def _first_fault(error: ValidationError) -> str:
    faults = error.errors()
    key = _key(faults[0]["loc"])
    if faults[0]["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _all_keys(Config), n=1, cutoff=0.0)
        return f"unknown config key {key} / did you mean {near[0]}?"
    # A value of several types has a fault for each.
    reasons = " or ".join(dict.fromkeys(fault["msg"] for fault in faults if _key(fault["loc"]) == key))
    return f"config key {key}: {reasons}" if key else f"config: {reasons}"


def _key(location: tuple[str | int, ...]) -> str:
    """The dotted key of a fault, without what pydantic adds inside a value (list index, branch of a union)."""
    parts, model = [], Config
    for part in location:
        parts.append(str(part))
        field = model.model_fields.get(str(part))
        if field is None or not _is_section(field.annotation):
            break
        model = field.annotation
    return ".".join(parts)


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted keys of all values and sections."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        if _is_section(field.annotation):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
