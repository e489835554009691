"""Checks exported drafts against the original library: speculators, on PyTorch, in an environment of its own.

    .venv/bin/python tools/check_with_originals.py [DRAFT_FOLDER ...]

Every draft is written by us, loaded there with strict keys, and both run the same tokens and features through the
training graph: the logits of all steps must agree. Without folders, random drafts with every option are made.
The environment is made on the first run (a few minutes; `--torch` takes another requirement, for example a CPU build)
and kept in `.originals/`. Exit status 1 when a draft does not load or differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS, LENGTH, LIMIT, RECORDED = 4, 24, 1e-4, 16
# speculators without its dependencies, since those bring CUDA builds of torch and more; these are what it imports.
LIBRARY = ["speculators==0.9.0", "hs-connectors==0.9.0"]
NEEDED = ["transformers==5.19.0", "datasets", "loguru", "pydantic-settings", "typer", "openai", "safetensors", "psutil"]


def make_environment(folder: Path, python: str, *installs: list[str]) -> Path:
    """The interpreter of an environment with what each of `installs` (arguments of pip install) brings; made unless it
    is there already. RuntimeError if it cannot be made."""
    interpreter = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        try:
            subprocess.run([python, "-m", "venv", "--clear", folder], check=True)  # pip cannot repair half an install
            for install in installs:
                subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *install], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"cannot make the environment / {folder} / {error}") from error
        (folder / ".ready").touch()
    return interpreter


def speculators_installs(torch: str) -> tuple[list[str], list[str]]:
    """What `make_environment` needs for speculators. torch: pip requirement for PyTorch."""
    return [torch, *NEEDED, "httpx"], ["--no-deps", *LIBRARY]


def variants() -> dict[str, dict]:
    """Changes of the decoder's config ("layer") and of the draft's: every option in some variant."""
    window = {"sliding_window": 7, "use_sliding_window": True}
    return {
        "norm_before_residual, norm_before_fc, yarn rope": {
            "norm_before_residual": True,
            "norm_before_fc": True,
            "layer": {"rope_parameters": _rope("yarn")},
        },
        "EAGLE-3.1, four taps not in order, linear rope": {
            "fc_norm": True,
            "norm_output": True,
            "taps": (2, 5, 3, 6),
            "layer": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        },
        "two layers, a window in the first": {
            "layer": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], **window}
        },
        "biases, a window, llama3 rope": {
            "layer": {
                "attention_bias": True,
                "mlp_bias": True,
                "layer_types": ["sliding_attention"],
                "rope_parameters": _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
                **window,
            }
        },
        "Qwen3, full vocabulary": {"layer": {"model_type": "qwen3"}, "draft_vocab_size": 512},
    }


def _rope(kind: str, **more: float) -> dict:
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, **more}


def random_draft(changes: dict):
    """A random draft with norms far from one, head_dim * heads != hidden, grouped queries."""
    import jax.numpy as jnp
    import numpy as np

    from eagle3_jax.draft.config import DraftConfig
    from eagle3_jax.draft.draft import draft_graph, new_draft
    from eagle3_jax.models.config import decoder_config
    from eagle3_jax.models.weights import insert
    from eagle3_jax.taps import TapSet

    changes = dict(changes)
    layer = {
        **{"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96},
        **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"max_position_embeddings": 128, "rms_norm_eps": 1e-5},
        **changes.pop("layer", {}),
    }
    taps = TapSet(changes.pop("taps", (2, 4, 6)))
    size = changes.pop("draft_vocab_size", 128)
    config = DraftConfig(decoder_config(layer), taps, size, 64, **changes)
    rng = np.random.default_rng(0)
    params: dict = {}
    for name, shape in sorted(draft_graph(config)[1].items()):
        noise = rng.standard_normal(shape)
        insert(params, name, jnp.asarray(1 + 0.3 * noise if "norm" in name else 0.1 * noise, jnp.float32))
    d2t = np.sort(rng.choice(512, size, replace=False))
    verifier = {"name_or_path": None, "architectures": ["LlamaForCausalLM"]}
    return new_draft(config, params, d2t, {"verifier": verifier})


def inputs(draft):
    """Random ids [1, T] and features [1, T, A*H] for a draft."""
    import numpy as np

    rng = np.random.default_rng(1)
    width = len(draft.taps) * draft.config.target_hidden_size
    ids = rng.integers(0, draft.config.decoder.vocab_size, (1, LENGTH)).astype(np.int32)
    return ids, rng.standard_normal((1, LENGTH, width)).astype(np.float32)


def worst_difference(draft, theirs: dict) -> float:
    """Largest relative difference of a step's logits to `theirs` (logits.STEP [1, T-1, columns]) on valid slots."""
    import jax.numpy as jnp
    import numpy as np

    import eagle3_jax as e3

    ids, features = inputs(draft)
    taps = e3.Taps.from_fused(jnp.asarray(features), draft.taps)
    worst = 0.0
    for step, logits in enumerate(draft.ttt_forward(taps, ids, STEPS)):
        reference = theirs[f"logits.{step}"][:, : LENGTH - 1 - step]
        ours = np.asarray(logits)[:, : LENGTH - 1 - step, : reference.shape[-1]]
        worst = max(worst, float(np.linalg.norm(ours - reference) / np.linalg.norm(reference)))
    return worst


def run_original(draft, interpreter: Path, folder: Path) -> tuple[dict, int]:
    """The original's logits of each step, and the number of tensors it loaded. Raises RuntimeError with its words."""
    import numpy as np

    import eagle3_jax as e3

    e3.save_draft(draft, folder)
    ids, features = inputs(draft)
    np.savez(folder.with_suffix(".npz"), ids=ids, features=features)
    done = subprocess.run([interpreter, __file__, "--inside", folder], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    count = json.loads(done.stdout.strip().splitlines()[-1])["tensors"]
    return dict(np.load(folder.with_suffix(".out.npz"))), count


def check(name: str, draft, interpreter: Path, folder: Path, recorded: dict) -> bool:
    """Runs both, prints and returns whether they agree; keeps the first logits of each slot in `recorded`."""
    try:
        theirs, count = run_original(draft, interpreter, folder)
    except RuntimeError as error:
        print(f"{name}: does not load\n{error}", flush=True)
        return False
    worst = worst_difference(draft, theirs)
    print(f"{name}: {count} tensors, strict; logits of {STEPS} steps differ by {worst:.1e} at most", flush=True)
    recorded |= {f"{name}/{key}": array[..., :RECORDED] for key, array in theirs.items()}
    return worst < LIMIT


def inside(folder: Path) -> None:
    """Runs in the other environment: loads the folder with speculators and stores the logits of each step."""
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).float().eval()
    tensors = load_file(folder / "model.safetensors")
    result = model.load_state_dict(tensors, strict=False)
    # The library never stores the verifier's parts; every other key must match.
    missing = [key for key in result.missing_keys if not key.startswith("verifier_")]
    if missing or result.unexpected_keys:
        raise SystemExit(f"missing {missing}, unexpected {result.unexpected_keys}")
    data = np.load(folder.with_suffix(".npz"))
    ids = torch.from_numpy(data["ids"]).long()[:, 1:]
    features = torch.from_numpy(data["features"])[:, :-1]
    logits: list[np.ndarray] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: logits.append(out.detach().numpy()))
    with torch.no_grad():
        model(
            hidden_states=features,
            input_ids=ids,
            document_ids=torch.zeros_like(ids),
            position_ids=torch.arange(ids.shape[1])[None],
            ttt_steps=STEPS,
        )
    np.savez(folder.with_suffix(".out.npz"), **{f"logits.{step}": array for step, array in enumerate(logits)})
    print(json.dumps({"tensors": len(tensors)}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="*", type=Path, help="draft folders of any format that e3.load_draft reads")
    parser.add_argument("--env", type=Path, default=ROOT / ".originals", help="where the other environment lies")
    parser.add_argument("--python", default=sys.executable, help="interpreter to make it with")
    parser.add_argument("--torch", default="torch", help="pip requirement for PyTorch")
    parser.add_argument("--record", type=Path, help="store the original's logits there (tests/golden/originals.npz)")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.inside)
        return 0
    sys.path.insert(0, str(ROOT))
    import jax
    import numpy as np

    import eagle3_jax as e3

    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        interpreter = make_environment(arguments.env, arguments.python, *speculators_installs(arguments.torch))
    except RuntimeError as error:
        sys.exit(f"{error}: try another --torch or --python")
    drafts = {str(path): e3.load_draft(path, dtype="float32") for path in arguments.drafts}
    drafts = drafts or {name: random_draft(changes) for name, changes in variants().items()}
    recorded: dict = {}
    with tempfile.TemporaryDirectory() as scratch:
        results = [
            check(name, draft, interpreter, Path(scratch) / f"draft{i}", recorded)
            for i, (name, draft) in enumerate(drafts.items())
        ]
    if arguments.record and all(results):
        np.savez_compressed(arguments.record, **recorded)
    print(f"{sum(results)} of {len(results)} drafts agree")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
