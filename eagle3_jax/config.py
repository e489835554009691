"""Training configs: typed, strict YAML with `a.b=c` overrides. An unknown key is an error naming the nearest one."""

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import to_jsonable_python

from eagle3_jax.errors import UserError

Positive = Annotated[int, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]  # of a file, a folder, or on the hub


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _a_switch_is_no_number(cls, value: Any, info: Any) -> Any:
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) for v in values) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("true and false are no values of it")
        return value


class TargetConfig(_Strict):
    """path: HF folder, .gguf file, hub name, or `demo` (the bundled SmolLM2).

    quantize: `int8` keeps the weights of its blocks in half the memory; the draft then learns from what that target
    computes, and is to be served with the same (docs/targets.md).
    """

    path: Name
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantize: Literal["int8"] | None = None


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
    loss_masks: Name | None = None


class DataConfig(_Strict):
    """train, heldout: JSONL (.gz), JSON or Parquet files, or `hf:NAME:SPLIT` of the hub, whose rows are conversations,
    {input_ids, loss_mask}, or text (docs/training.md); or stored features of others (folders or files; StoredConfig).

    length: tokens of a packed row. overlong: longer documents are cut there, or left out. duplicates: documents that
    occur twice are kept (and counted), or left out. last_turn_only: supervise only the last answer of a conversation.
    chat_template: variables for the target's chat template, such as {enable_thinking: false}; serve with the same.
    """

    train: Name | Annotated[list[Name], Field(min_length=1)]
    heldout: Name | Annotated[list[Name], Field(min_length=1)]
    length: Annotated[int, Field(ge=8)] = 2048
    overlong: Literal["cut", "drop"] = "cut"
    duplicates: Literal["keep", "drop"] = "keep"
    last_turn_only: bool = False
    chat_template: dict[str, str | bool | int | float] = {}
    stored: StoredConfig = StoredConfig()


class DraftShape(_Strict):
    """taps: canonical points, or `paper` for (2, N//2, N-3). vocab_size: rows of the draft's head; 32000, the
    default, means all of a smaller vocabulary.

    initialise: `random`, or `last_block`: blocks start as copies of the target's last one and fc passes the last tap
    through, so that training begins from the target's own final computation. last_tap_scale: times this. With fc_norm
    the last tap comes with a root mean square of 1, far less than the block is used to; without, 1 keeps its size.
    """

    taps: Literal["paper"] | list[int] = "paper"
    vocab_size: Positive = 32000
    num_layers: Annotated[int, Field(ge=1, le=64)] = 1
    intermediate_size: Positive | None = None
    initialise: Literal["random", "last_block"] = "random"
    last_tap_scale: Annotated[float, Field(gt=0)] = 1.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class OptimiserConfig(_Strict):
    """AdamW on everything, or Muon on the matrices of the draft's blocks and AdamW on the rest.

    warmup: share of the run with a rising rate. schedule: how it falls afterwards, to `final_rate` times the peak;
    `wsd` stays at the peak until the last `decay` of the run and falls linearly there. clip: largest norm of the
    gradients of all weights together, null for no limit. ema: decay of a moving average of the weights, which is then
    what is evaluated and exported (0.999 looks back over some 1000 steps); null for none.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    muon_learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.015
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    final_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] | None = 0.5
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None


class LossConfig(_Strict):
    """kind, of the draft's distribution q against the target's p, both over the draft vocabulary:

    `kl` (p renormalised there; speculators) and `ce` (the same gradient, EAGLE, SpecForge, ModelOpt); `hard_ce`, -log q
    of the target's choice; `lk_alpha`, -log sum min(p, q), the acceptance of sampling itself with p as it is (not
    renormalised), and `lk_lambda`, which moves from kl to 1 - sum min(p, q) as that grows, at the pace of lk_decay.
    out_of_vocabulary: slots whose target's choice the draft cannot say are kept in the mean (speculators, ModelOpt), or
    left out of it (EAGLE, SpecForge); hard_ce has no label there and always leaves them out. In acceptance they are
    misses, always.
    """

    kind: Literal["kl", "ce", "hard_ce", "lk_alpha", "lk_lambda"] = "kl"
    lk_decay: Annotated[float, Field(ge=0)] = 3.0
    out_of_vocabulary: Literal["keep", "skip"] = "keep"


class TrainingConfig(_Strict):
    """ttt_steps: unrolled draft steps, the loss of step s times step_decay^s. batch_rows: rows an optimiser step,
    computed in `accumulate` parts one after another (less memory, the same weights; on a CPU in more, small ones).
    features: see training.features; with stored features `online` reads the files at each step.

    train_head: the draft's head starts as the target's rows; false keeps it so (speculators since 0.5), which
    generalises better from little data.
    train_embedding: the draft's embedding is the target's and stays so; true trains it (it must then be exported, and
    some servers use the target's all the same).
    feature_noise: amplitude of uniform noise on the target's features in training (0.05 in speculators).
    remat: compute draft steps again in the backward pass instead of keeping their activations: less memory, a third
    more time. teacher_chunk: tokens of a device whose logits exist at a time (on a CPU at most 128).
    feature_loss: weight of the distance between the draft's output and the target's last hidden state one token on.
    EAGLE-3 trains without it (0); with little data it helps (docs/experiments.md).
    target_hub_id: the name under which servers load the target, where the path is no hub name (a GGUF, a local copy).
    checkpoint_every: steps between checkpoints; the newest `keep_checkpoints` stay, and the best by held-out tau, which
    is saved whenever an evaluation finds one.
    minutes: None, or a budget of training time: as many rows take part as it has room for in all `epochs` passes.
    """

    epochs: Positive = 10
    minutes: Annotated[float, Field(gt=0)] | None = None
    batch_rows: Positive = 8
    accumulate: Positive = 1
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 3
    step_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    train_head: bool = True
    train_embedding: bool = False
    feature_noise: Annotated[float, Field(ge=0)] = 0.0
    remat: bool = False
    teacher_chunk: Positive = 1024
    feature_loss: Annotated[float, Field(ge=0)] = 0.0
    features: Literal["online", "ram"] = "online"
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    target_hub_id: str | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    checkpoint_every: Positive = 200
    keep_checkpoints: Positive = 1
    evaluate_every: Positive = 100
    evaluate_steps: Annotated[int, Field(ge=1, le=16)] = 5


class MeshConfig(_Strict):
    """Devices, of all processes together (eagle3_jax/sharding.py): data x fsdp x tensor must be their number.

    data: copies that see different rows, null for as many as the others leave. fsdp: the same, each keeping a part of
    every weight. tensor: parts of the heads, of the MLP and of the vocabulary.
    """

    data: Positive | None = None
    fsdp: Positive = 1
    tensor: Positive = 1


class EvaluationConfig(_Strict):
    """After training, `count` prompts are answered for real (0: none), and tau stands beside the simulated one.

    prompts: file of rows with `turns`; null takes what precedes the answers of held-out documents.
    """

    prompts: Name | None = None
    count: Annotated[int, Field(ge=0)] = 8
    max_new_tokens: Positive = 128
    strategy: Annotated[str, Field(pattern=r"^(chain:\d+|tree:\d+x\d+x\d+)$")] = "chain:5"


class TrackingConfig(_Strict):
    """to: trackers besides the console and metrics.jsonl, which are always written. project: its name there."""

    to: list[Literal["tensorboard", "wandb", "trackio"]] = []
    project: str = "eagle3-jax"


class Config(_Strict):
    """One training run, written to runs_dir/name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    runs_dir: Name = "runs"
    target: TargetConfig
    data: DataConfig
    draft: DraftShape = DraftShape()
    optimiser: OptimiserConfig = OptimiserConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _consistent(self):
        if self.draft.norm_before_fc and self.draft.fc_norm:
            raise ValueError("draft.norm_before_fc and draft.fc_norm are both on; choose one")
        if self.training.batch_rows % self.training.accumulate:
            raise ValueError(
                f"training.batch_rows {self.training.batch_rows} cannot be computed in {self.training.accumulate} "
                "equal parts; training.accumulate must divide it"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


def fill_in(before: dict[str, Any], section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Gives a config that was saved by an older version the keys it lacks, at their defaults; returns them, dotted.

    That is the same training because a new key's default must be what was done before there was the key.
    """
    added = []
    for name, field in section.model_fields.items():
        if name not in before:
            if not field.is_required():
                before[name] = to_jsonable_python(field.default)
                added.append(f"{prefix}{name}")
        elif _is_section(field.annotation) and isinstance(before[name], dict):
            added += fill_in(before[name], field.annotation, f"{prefix}{name}.")
    return added


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a YAML config and applies `a.b=c` overrides (values in YAML syntax). Raises UserError on any fault."""
    try:
        raw = parse_yaml(Path(path).read_text(encoding="utf-8"))
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


class _Loader(yaml.SafeLoader):
    """YAML without keys that occur twice, of which YAML takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The value of YAML text. Raises yaml.YAMLError, also for a key that occurs twice."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("nested too deep") from error


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
        raw[last] = parse_yaml(value)
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
