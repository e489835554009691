"""What several commands share: options, starting JAX, opening a target, writing JSON."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_jax.errors import UserError
from eagle3_jax.files import write_whole

if TYPE_CHECKING:
    from eagle3_jax.draft.draft import Draft
    from eagle3_jax.models.target import Target
    from eagle3_jax.taps import TapSet

DType = Literal["bfloat16", "float16", "float32"]
Quantize = Literal["int8"]


def check_folder(option: str, path: Path | None) -> Path | None:
    """Of a file to write: at once, and not when hours of work are about to be written there."""
    if path is not None and not path.parent.is_dir():
        raise UserError(f"{option}: no folder {path.parent} / {path} / make it first")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise UserError(f"{option}: no permission to write to {path.parent} / {path} / name another folder")
    if path is not None and path.is_dir():
        raise UserError(f"{option}: {path} is a folder / name a file")
    return path


TargetOption = Annotated[
    str,
    typer.Option("--target", help="Model folder, .gguf file, hub name `org/name`, or `demo` (bundled SmolLM2-135M)."),
]
NamedTargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Model folder, .gguf file, hub name `org/name`, or `demo` (bundled SmolLM2-135M).",
        show_default="the one that the draft names",
    ),
]
DraftOption = Annotated[str | None, typer.Option("--draft", help="Draft folder or hub name.")]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Devices to spread the models over, as tensor=4 or fsdp=2,tensor=2.",
        show_default="one device",
    ),
]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="Of weights and activations.")]
QuantizeOption = Annotated[
    Quantize | None,
    typer.Option("--quantize", help="Keep the target's blocks as int8, in half the memory.", show_default="not at all"),
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json", help="Also write the result to this file.", callback=lambda path: check_folder("--json", path)
    ),
]


TemplateOption = Annotated[
    str, typer.Option(help="Variables for the chat template, in YAML, as data.chat_template: {enable_thinking: no}")
]


def template_variables(text: str) -> dict[str, Any]:
    """What `--chat-template` says. Raises UserError for what is no mapping."""
    import yaml

    from eagle3_jax.config import parse_yaml

    try:
        variables = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"--chat-template {text!r} is not valid YAML") from error
    if not isinstance(variables, dict):
        raise UserError(f"--chat-template {text!r} is no mapping / for example {{enable_thinking: no}}")
    return variables


def tap_set(text: str) -> "TapSet":
    """The taps that `--taps` names, in order. UserError for what is no list, WiringError for what is no tap set."""
    from eagle3_jax.taps import TapSet

    try:
        numbers = [int(part) for part in text.strip("[]() ").split(",")]
    except ValueError as error:
        raise UserError(f"--taps {text!r} is no list of numbers / write it like 2,15,27") from error
    return TapSet(numbers)


def note(message: str) -> None:
    """One line on stderr; stdout is for the product of a command."""
    print(message, file=sys.stderr, flush=True)


def start_jax(dtype: DType) -> None:
    """Keeps compiled programs between runs and warns where the machine is known to be slow.

    The cache is ~/.cache/eagle3_jax/xla, or where JAX_COMPILATION_CACHE_DIR says.
    """
    # Read when transformers is first imported, which would otherwise report that torch is absent: it is on purpose.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import jax

    # orbax warns at every checkpoint that has no held-out score; ours say so themselves.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "eagle3_jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if dtype == "bfloat16" and jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12):
        note(f"warning: bfloat16 on CPU is about ten times slower with jax {jax.__version__} than with 0.12 or newer")


def open_target(name: str, dtype: DType, quantize: Quantize | None = None, mesh: str | None = None) -> "Target":
    """Starts JAX and loads a target onto the devices of the mesh. Raises UserError if there is no such target, or for a
    mesh that is none."""
    start_jax(dtype)
    from eagle3_jax.models.target import load_target

    return load_target(name, dtype, mesh=mesh, quantize=quantize)


def open_pair(
    target: str | None,
    draft: str | None,
    dtype: DType,
    mesh: str | None = None,
    quantize: Quantize | None = None,
) -> tuple["Target", "Draft | None"]:
    """Starts JAX, loads a target and the draft bound to it (`warn_of_pair` says what is odd about the two), both on the
    devices of the mesh.

    Without a target, the one that the draft names. Raises UserError if one of them cannot be had or does not fit.
    """
    if target is None and draft is None:
        raise UserError("--target is missing / name a model, or a --draft whose config names one")
    start_jax(dtype)
    from eagle3_jax.draft.draft import load_draft
    from eagle3_jax.draft.verifier import find_target
    from eagle3_jax.models.target import load_target
    from eagle3_jax.sharding import parse_mesh

    if mesh is not None:
        parse_mesh(mesh)  # a mistake is said before files are looked for
    if target is None:
        target, origin = find_target(draft)
        note(origin)
    loaded = load_target(target, dtype, mesh=mesh, quantize=quantize)
    return loaded, load_draft(draft, dtype=dtype, target=loaded) if draft else None


def warn_of_pair(target: "Target", draft: "Draft | None") -> None:
    """On stderr: other weights than the draft was trained for, a context longer than its own, and heads that do not
    divide over the devices."""
    from eagle3_jax.draft.draft import binding_warning
    from eagle3_jax.speculate.generate import window_warning

    if draft is not None:
        for warning in filter(None, (binding_warning(draft, target), window_warning(draft, target))):
            note(warning)
    parts = [("target", target.config)] + ([] if draft is None else [("draft", draft.config.decoder)])
    for name, decoder in parts:
        if warning := target.placement.uneven(name, decoder.num_heads, decoder.num_kv_heads):
            note(warning)


def write_json(path: Path | None, content: Any) -> None:
    """Writes the file whole or not at all; does nothing for None. Raises UserError if it cannot be written."""
    if path is None:
        return
    try:
        write_whole(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write JSON / {path} / {error.strerror or error}") from error
