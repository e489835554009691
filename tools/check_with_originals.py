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
STEPS, LENGTH, LIMIT = 4, 40, 1e-4
# speculators without its dependencies, since those bring CUDA builds of torch and more; these are what it imports.
LIBRARY = ["speculators==0.9.0", "hs-connectors==0.9.0"]
NEEDED = ["transformers==5.19.0", "datasets", "loguru", "pydantic-settings", "typer", "openai", "safetensors", "psutil"]


def make_environment(folder: Path, python: str, torch: str) -> Path:
    """The environment's interpreter; made unless it is there already."""
    interpreter = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [interpreter, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, torch, *NEEDED], check=True)
        subprocess.run([*pip, "--no-deps", *LIBRARY], check=True)
        (folder / ".ready").touch()
    return interpreter


def variants() -> dict[str, dict]:
    """Changes of the decoder's config ("layer") and of the draft's, one network option each."""
    return {
        "plain": {},
        "norm_before_residual": {"norm_before_residual": True},
        "norm_before_fc": {"norm_before_fc": True},
        "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
        "four taps": {"taps": (2, 3, 5, 6)},
        "full vocabulary": {"draft_vocab_size": 512},
        "two layers, a window in the first": {
            "layer": {
                "num_hidden_layers": 2,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "norm_output": True,
        },
        "Qwen3": {"layer": {"model_type": "qwen3"}},
        "biases": {"layer": {"attention_bias": True, "mlp_bias": True}},
        "llama3 rope": {"layer": {"rope_parameters": _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)}},
        "yarn rope": {"layer": {"rope_parameters": _rope("yarn")}},
        "linear rope": {"layer": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}},
    }


def _rope(kind: str, **more: float) -> dict:
    return {
        **{"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
        **more,
    }


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


def our_logits(draft, ids, features):
    import eagle3_jax as e3

    taps = e3.Taps.from_fused(features, draft.taps)
    return draft.ttt_forward(taps, ids, STEPS)


def check(name: str, draft, interpreter: Path, folder: Path) -> bool:
    """Writes the draft, runs the original on it, prints and returns whether both agree."""
    import numpy as np

    import eagle3_jax as e3

    e3.save_draft(draft, folder)
    rng = np.random.default_rng(1)
    config = draft.config
    width = len(config.taps) * config.target_hidden_size
    ids = rng.integers(0, config.decoder.vocab_size, (1, LENGTH)).astype(np.int32)
    features = rng.standard_normal((1, LENGTH, width)).astype(np.float32)
    np.savez(folder.with_suffix(".npz"), ids=ids, features=features)
    command = [interpreter, __file__, "--inside", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: does not load\n{done.stderr.strip()[-2000:]}")
        return False
    loaded = json.loads(done.stdout.strip().splitlines()[-1])
    theirs = np.load(folder.with_suffix(".out.npz"))
    worst = 0.0
    for step, logits in enumerate(our_logits(draft, ids, features)):
        valid = LENGTH - 1 - step
        ours, reference = np.asarray(logits)[0, :valid], theirs[f"logits.{step}"][0, :valid]
        worst = max(worst, float(np.linalg.norm(ours - reference) / np.linalg.norm(reference)))
    good = worst < LIMIT
    print(f"{name}: {loaded['tensors']} tensors, strict; logits of {STEPS} steps differ by {worst:.1e} at most")
    return good


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
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.inside)
        return 0
    sys.path.insert(0, str(ROOT))
    import jax

    import eagle3_jax as e3

    jax.config.update("jax_default_matmul_precision", "highest")
    interpreter = make_environment(arguments.env, arguments.python, arguments.torch)
    drafts = {str(path): e3.load_draft(path, dtype="float32") for path in arguments.drafts}
    drafts = drafts or {name: random_draft(changes) for name, changes in variants().items()}
    with tempfile.TemporaryDirectory() as scratch:
        results = [
            check(name, draft, interpreter, Path(scratch) / f"draft{i}")
            for i, (name, draft) in enumerate(drafts.items())
        ]
    print(f"{sum(results)} of {len(results)} drafts agree")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
