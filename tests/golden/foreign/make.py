"""Writes the files of this folder: `python make.py` in an environment with torch and numpy (2.13.0, Python 3.11)."""

import collections
import gzip
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent


def dtypes() -> dict:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "f32": base,
        "t": base.t(),
        "slice": base[1:, ::2],
        "exp": torch.tensor([7.0]).expand(3, 2),
        "bf16": base.bfloat16(),
        "f16": base.half(),
        "f64": base.double(),
        **{f"i{n}": torch.arange(5, dtype=getattr(torch, f"int{n}")) for n in (64, 32, 16)},
        "i8": torch.arange(-2, 3, dtype=torch.int8),
        "u8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "c64": torch.tensor([1 + 2j]),
        "fp8": torch.tensor([1.0, 2.0, -0.5]).to(torch.float8_e4m3fn),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "param": torch.nn.Parameter(base[:1].clone()),
        "nested": {
            "a": [1, 2.5, None, True, "x", b"yz"],
            "t": (base[0], torch.Size([1, 2])),
            "dtype": torch.bfloat16,
            "set": {1, 2},
            "od": collections.OrderedDict(a=1),
            "dev": torch.device("cpu"),
            "big": 2**70,
            "counter": collections.Counter([1, 1, 2]),
        },
    }


def samples() -> None:
    """One document of seven tokens and four states of width 4: normal numbers of seed 0, in bfloat16."""
    states = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 7, 4)).astype(np.float32)).bfloat16()
    ids, mask = torch.arange(10, 17), torch.tensor([0, 0, 1, 1, 1, 0, 1])
    aux, last = torch.cat(list(states[:3]), dim=-1), states[3].contiguous()
    common = {"input_ids": ids, "loss_mask": mask}
    torch.save(common | {"hidden_states": [s.contiguous() for s in states]}, HERE / "speculators_v1.pt")
    torch.save(common | {"hidden_state": aux, "target": last}, HERE / "speculators_v0.pt")
    specforge = common | {"hidden_state": last[None], "aux_hidden_state": aux[None]}
    torch.save(specforge, HERE / "specforge.ckpt")
    with gzip.open(HERE / "specforge.ckpt.gz", "wb") as file:
        torch.save(specforge, file)
    modelopt = common | {"hidden_states": last, "aux_hidden_states": aux, "conversation_id": "c1"}
    torch.save(modelopt, HERE / "modelopt.pt")


if __name__ == "__main__":
    many = dtypes()
    torch.save(many, HERE / "dtypes.pt")
    old = {key: value for key, value in many.items() if key not in ("fp8", "u16")}
    torch.save(old, HERE / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(2, 3), HERE / "module.pt")
    torch.save(torch.eye(3).to_sparse(), HERE / "sparse.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), HERE / "script.pt")
    samples()
