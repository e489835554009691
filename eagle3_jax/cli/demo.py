"""`eagle3 demo`, which `make demo` runs."""

import os
from pathlib import Path

from eagle3_jax.cli.common import note, start_jax
from eagle3_jax.cli.train import TrainingProgress
from eagle3_jax.config import load_config

_ROOT = Path(__file__).resolve().parents[2]


def demo_command() -> None:
    """Trains a small draft for SmolLM2-135M, generates with it, and compares with plain decoding (runs/demo)."""
    os.chdir(_ROOT)  # the paths of configs/demo.yaml are relative to the checkout, and so is runs/demo
    config = load_config("configs/demo.yaml")
    start_jax(config.target.dtype)
    from eagle3_jax.bench.demo import DemoSize, run_demo, table

    with TrainingProgress() as progress:
        result = run_demo(config, DemoSize(), progress.update, note)
    rows = table(result)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    machine = result["machine"]
    print(
        f"\nsimulated tau {result['simulated_tau']:.3f}, measured {result['tau']:.3f} ({result['strategy']}); "
        f"float32 output identical to plain: {'yes' if result['identical'] else 'NO'}"
    )
    verdict = "faster" if result["speedup"] > 1 else "not faster"
    print(
        f"speculation is {verdict} than plain decoding here: {result['speedup']:.2f}x on {machine['cores']} cores of "
        f"{machine['processor']} (native bf16: {machine['native_bf16']}), jax {result['versions']['jax']}"
    )
