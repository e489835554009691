"""A line about the machine, for reports."""

import os
import platform
from pathlib import Path

import jax

_BF16_FLAGS = ("amx_bf16", "avx512_bf16")


def describe_machine() -> dict[str, str | int]:
    """Processor, cores, whether it multiplies bf16 natively, device."""
    model, flags = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text(encoding="utf-8", errors="replace")
        fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        model, flags = fields.get("model name", model), fields.get("flags", "")
    return {
        "processor": model,
        "cores": os.cpu_count() or 0,
        "native_bf16": " ".join(f for f in _BF16_FLAGS if f in flags.split()) or "none",
        "device": str(jax.devices()[0].device_kind),
    }
