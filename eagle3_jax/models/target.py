"""The frozen target: configuration, parameters, tokenizer; loading and one full-sequence forward."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.errors import UserError
from eagle3_jax.models import gguf, gguf_tokenizer, int8
from eagle3_jax.models.attention import causal
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.families import family_of
from eagle3_jax.models.families.text_parts import lifted
from eagle3_jax.models.family import Family
from eagle3_jax.models.fingerprint import target_fingerprint, tokenizer_fingerprint
from eagle3_jax.models.quantised import dequantised, quantisation_of
from eagle3_jax.models.weights import (
    Graph,
    Params,
    TensorFiles,
    abstract_params,
    checked_dtype,
    fill,
    read_json,
    safetensors_files,
    with_one_head,
    with_progress,
)
from eagle3_jax.sharding import ONE_DEVICE, Placement, parse_mesh
from eagle3_jax.taps import Taps, TapSet

QUANTIZE = (None, "int8")  # how `load_target` can keep weights


@dataclass(frozen=True)
class TargetOutput:
    """logits f32 [B,T,V]; taps: Taps of [B,T,H]; last_hidden [B,T,H], before the final norm."""

    logits: jax.Array
    taps: Taps | None
    last_hidden: jax.Array


@dataclass(frozen=True)
class Target:
    """A loaded target. `graph` and `params` are the nnx module, split once; everything jitted takes the two.

    placement: on which devices the parameters are. quantize: "int8" where the kernels of its blocks are, see
    `models.int8`.
    """

    path: str
    config: DecoderConfig
    graph: Graph
    params: Params
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    hub_id: str | None
    no_tokenizer: str | None = None
    architecture: str = "LlamaForCausalLM"
    placement: Placement = ONE_DEVICE
    quantize: str | None = None

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def dtype(self):
        return self.params["model"]["embed_tokens"]["weight"].dtype

    @property
    def final_norm(self) -> jax.Array:
        """What the final norm multiplies by [H], float32: its weight, with Gemma's offset."""
        return self.params["model"]["norm"]["weight"].astype(jnp.float32) + self.config.norm_offset

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        return target_fingerprint(self.config, self.params, self.quantize)

    @functools.cached_property
    def tokenizer_fingerprint(self) -> str | None:
        return tokenizer_fingerprint(self.tokenizer)

    def forward(self, ids, taps=(), lengths=None) -> TargetOutput:
        """Logits, tapped residual stream and last hidden state of whole sequences.

        ids: int [B, T]; taps: canonical points in 0..N, in the order wanted; lengths: int [B], tokens that count in
        each row (the rest is padding), None = all. Raises WiringError for a tap the target lacks.
        """
        ids = checked_ids(ids, self.config.vocab_size)
        tap_set = TapSet(taps).check(self.num_layers) if len(taps) else None
        lengths = jnp.full(ids.shape[0], ids.shape[1]) if lengths is None else _checked_lengths(lengths, *ids.shape)
        logits, tapped, last = _forward(self.graph, tap_set, self.params, ids, lengths)
        return TargetOutput(logits, tapped, last.array)

    def require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            reason = self.no_tokenizer or "add its tokenizer files to the folder"
            raise UserError(f"the target has no tokenizer / {self.path} / {reason}")
        return self.tokenizer


def checked_ids(ids: Any, vocab_size: int) -> jax.Array:
    """ids as int32 [B, T]; UserError for another rank or ids outside the vocabulary, which jax would clamp silently."""
    try:
        ids = np.asarray(ids)
    except ValueError as error:
        raise UserError("rows of token ids differ in length / pad them, and give lengths= to forward") from error
    if ids.ndim != 2 or ids.size == 0:
        raise UserError(f"token ids have shape {list(ids.shape)} / give a non-empty [batch, tokens] array")
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"token ids are {ids.dtype} / give integers")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise UserError(f"token ids outside 0..{vocab_size - 1} / were they made with another tokenizer?")
    return jnp.asarray(ids, jnp.int32)


def _checked_lengths(lengths: Any, rows: int, width: int) -> jax.Array:
    numbers = np.asarray(lengths)
    whole = np.issubdtype(numbers.dtype, np.integer)
    if not whole or numbers.shape != (rows,) or numbers.min() < 0 or numbers.max() > width:
        raise UserError(f"lengths {str(lengths)[:40]} / give {rows} integers in 0..{width}, one for each row of ids")
    return jnp.asarray(numbers, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(graph, taps: TapSet | None, params: Params, ids, lengths):
    model = graph.merge(params)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    documents = jnp.where(positions < lengths[:, None], 0, -1)
    per_token = jnp.broadcast_to(lengths[:, None], ids.shape)
    last, tapped, _ = model(ids, positions, causal(documents), taps=taps, lengths=per_token)
    return model.logits(last), tapped, last


def load_target(
    path: str | Path,
    dtype: Any = "bfloat16",
    family: Family | None = None,
    mesh: str | Mesh | None = None,
    quantize: str | None = None,
) -> Target:
    """Loads a target from a Hugging Face folder (safetensors), a .gguf file, a hub name `org/name`, or `demo`.

    dtype: of weights and activations: float32, bfloat16 or float16. family: of an architecture that is not built in
    (docs/add-a-target.md).
    mesh: devices to spread it over, as "tensor=4" (`sharding.parse_mesh`); each weight goes to them part by part.
    quantize: "int8" keeps the kernels of the blocks as int8 codes with a scale a row (`models.int8`), None as they are.
    No tokenizer files are needed: `target.tokenizer` may be None. Weights are read one tensor at a time.
    Raises UserError for anything missing, torn, unsupported or left over.
    """
    if quantize not in QUANTIZE:
        raise UserError(f"quantize {quantize!r} / give one of {QUANTIZE}")
    dtype = checked_dtype(dtype)
    placement = Placement(parse_mesh(mesh) if isinstance(mesh, str) else mesh)
    place = resolve(path)
    if place.suffix == ".gguf":
        raw = gguf.gguf_config(place)
        family = family or family_of(raw, str(place))
        tensors = with_progress(gguf.gguf_tensors(place), None, place.name)
        (tokenizer, no_tokenizer), generation = _gguf_tokenizer(place), {}
    else:
        raw = read_json(place / "config.json")
        family = family or family_of(raw, str(place))
        files = TensorFiles(safetensors_files(place))
        raw = lifted(raw, files)
        tensors = with_progress(dequantised(quantisation_of(raw, place), files, str(place)), len(files), place.name)
        tokenizer, no_tokenizer = _folder_tokenizer(place), None
        generation_file = place / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
    config = family.read(raw, str(place))
    add_scales = int8.add_scales if quantize else lambda model: model
    graph, shapes = abstract_params(nnx.eval_shape(lambda: add_scales(family.build(config))))
    ignore = ("lm_head.weight",) if config.tie_embeddings else ()
    placed = family.place(config, tensors)
    if config.tie_embeddings:
        placed = with_one_head(placed, str(place))
    placed = int8.quantised(placed, shapes)
    float32 = (*family.float32, ".scale")
    params = fill(shapes, placed, dtype, str(place), ignore, float32, placement)
    hub_id = raw.get("hub_id") or (str(path) if "/" in str(path) and place != Path(path) else None)
    end_tokens = _end_tokens(raw, generation, tokenizer, config.vocab_size, str(place))
    facts = (end_tokens, hub_id, no_tokenizer, family.architecture, placement, quantize)
    return Target(str(place), config, graph, params, tokenizer, *facts)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a target alone, without its weights. UserError if it has none."""
    place = resolve(path)
    tokenizer, reason = _gguf_tokenizer(place) if place.suffix == ".gguf" else (_folder_tokenizer(place), None)
    if tokenizer is None:
        raise UserError(f"the target has no tokenizer / {place} / {reason or 'add its tokenizer files to the folder'}")
    return tokenizer


def resolve(path: str | Path, also: tuple[str, ...] = ()) -> Path:
    """A local path as it is; `demo` is the bundled SmolLM2; `org/name` through huggingface_hub. Else UserError.

    also: file patterns to fetch from the hub besides configs, tokenizers and safetensors.
    """
    place = Path(os.path.expanduser(path))
    if place.exists():
        return place
    if str(path) == "demo":
        return gguf.find_demo_model()
    if str(path).count("/") != 1 or str(path).startswith((".", "/", "~")) or str(path).endswith(".gguf"):
        raise UserError(f"no such model / {path} / give a folder, a .gguf file or a hub name like org/name")
    from huggingface_hub import snapshot_download  # a second of import that only hub users pay

    try:
        return Path(
            snapshot_download(
                str(path), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *also]
            )
        )
    except Exception as error:  # the hub client raises a dozen unrelated types; each becomes one line
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"no local folder {path} and the hub did not give it / {reason[:200]}") from error


def _folder_tokenizer(folder: Path) -> Any:
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer  # imported here: it costs more than a second

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # a torn file raises whatever its parser does
        raise UserError(f"cannot read the tokenizer / {folder} / {' '.join(str(error).split())[:200]}") from error


def _gguf_tokenizer(file: Path) -> tuple[Any, str | None]:
    """The tokenizer in a GGUF, or None and the reason: a target without one still computes."""
    try:
        return gguf_tokenizer.gguf_tokenizer(file), None
    except UserError as error:
        return None, str(error)


def _end_tokens(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: Any, vocab_size: int, where: str
) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, then of config.json, either a number or a list, then the
    tokenizer's, which ends a chat where the two others are those of the base model (as in vLLM).

    Some models name ids besides that their head has no row for, which never come: they are left out.
    """
    ids: list[int] = []
    for name, source in (("generation_config.json", generation), ("config.json", config)):
        value = source.get("eos_token_id")
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in listed):
            raise UserError(f"eos_token_id in {name} is {value!r} / {where} / it must be a token id or a list of them")
        ids += listed
    ids += [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(token for token in dict.fromkeys(ids) if 0 <= token < vocab_size)
