"""What `test_mesh.py` runs with eight devices: `python -m tests.speculate.run_on_mesh quick|all FOLDER` prints JSON."""

import asyncio
import gc
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

import eagle3_jax as e3
from eagle3_jax.cli.main import main as eagle3
from eagle3_jax.serving.engine import Engine
from eagle3_jax.serving.requests import Request, Settings
from eagle3_jax.sharding import Placement, parse_mesh
from eagle3_jax.speculate.generate import begin, strategies_of
from eagle3_jax.speculate.round import speculate
from tests.cli.tiny_target import read_rows, write_prompts, write_tiny_target
from tests.models.test_loading import memory, write_shards
from tests.tiny import random_draft, write_target

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40], [3, 400, 77]]
GREEDY = e3.SamplingParams(12, stop_token_ids=())
SAMPLED = e3.SamplingParams(12, temperature=0.8, top_p=0.9, seed=1, stop_token_ids=())
QUICK = (("tree:2x2x4", GREEDY, False),)
CASES = (
    ("plain", GREEDY, False),
    ("tree:2x3x6", SAMPLED, False),
    ("chain:2", SAMPLED, True),
    ("chain:3", GREEDY, False),
)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
compiled: list[str] = []


def count(event: str, _: float, **facts) -> None:
    if "jaxpr_to_mlir" in event:
        compiled.append(event)


def answers(target: e3.Target, draft: e3.Draft, cases) -> list:
    def one(strategy: str, sampling: e3.SamplingParams, drawn: bool) -> list:
        results = e3.generate(target, draft, PROMPTS, strategy=strategy, sampling=sampling, sample_draft=drawn)
        return [[result.tokens, result.accepted] for result in results]

    return [one(*case) for case in cases]


def compare(folder: Path, draft: e3.Draft, expected: list, mesh: str, cases) -> dict:
    """A pair on a mesh against one device, and what a round of it does with its state."""
    target = e3.load_target(folder, "float32", mesh=mesh)
    bound = draft.bind(target)
    same = answers(target, bound, cases) == expected
    before = len(compiled)
    answers(target, bound, cases)
    again = len(compiled) - before
    strategy = strategies_of(cases[-1][0], bound)
    models, weights, state, _ = begin(target, bound, PROMPTS, [GREEDY] * 3, strategy)
    new, _ = speculate(models, strategy[0], weights, state)
    kept = [a.sharding == b.sharding for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True)]
    donated = all(array.is_deleted() for array in jax.tree.leaves((state.cache, state.draft.cache)))
    where = list(new.cache[0].k.sharding.spec)
    return {"same": same, "compiled": again, "shardings_kept": all(kept), "donated": donated, "cache": where}


def loading(folder: Path) -> dict:
    shard, mesh = write_shards(folder), "fsdp=2,tensor=2"
    e3.load_target(folder, mesh=mesh)  # once before: code, compiled programs and the allocator's arenas stay
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    target = e3.load_target(folder, mesh=mesh)
    highest, leaves = memory("VmHWM"), jax.tree.leaves(target.params)
    kernel = target.params["model"]["layers"][2]["mlp"]["experts"]["up_proj"]["weight"]
    return {
        "shard": shard,
        "before": before,
        "highest": highest,
        "parameters": sum(part.data.nbytes for leaf in leaves for part in leaf.addressable_shards),
        "largest": kernel.nbytes,
        "largest_part": max(part.data.nbytes for part in kernel.addressable_shards),
        "last_expert": float(np.asarray(kernel)[15, 0, 0]),
    }


def engine(target: e3.Target, draft: e3.Draft, expected: list) -> dict:
    """Whether an engine's greedy answers of `tree:2x2x4` are those expected, and what it compiles while serving."""
    served = Engine(target, draft, Settings(2, 40, "tree:2x2x4", (), 20, 8))
    served.start()
    while served.state == "warming":
        time.sleep(0.1)
    before = len(compiled)

    async def ask(i: int) -> list[int]:
        deltas = served.stream(Request(str(i), tuple(PROMPTS[i]), GREEDY))
        return [token async for delta in deltas for token in delta.tokens]

    async def together() -> list:
        answered = await asyncio.gather(*(ask(i) for i in range(len(PROMPTS))))
        await served.drain(10)
        return answered

    same = asyncio.run(together()) == [tokens for tokens, _ in expected]
    return {"same": same, "compiled": len(compiled) - before}


def commands(root: Path) -> dict:
    """Whether `data generate` and `doctor` find on two devices what they find on one."""
    folder = write_tiny_target(root / "talking")
    one = e3.load_target(folder, "float32")
    e3.save_draft(random_draft(one, taps=(0, 1, 2), d2t=range(0, one.config.vocab_size, 2)), root / "draft")
    prompts = write_prompts(root / "prompts.jsonl", [[letter * 3] for letter in "abcdefghijkl"])
    rows, found = [], []
    for number, mesh in enumerate(([], ["--mesh", "tensor=2"])):
        out, file = root / f"{number}.jsonl", root / f"{number}.json"
        common = ["--target", folder, "--dtype", "float32", *mesh]
        options = ["--prompts", prompts, "--out", out, "--max-new-tokens", 16, "--slots", 4]
        done = eagle3([str(part) for part in ("data", "generate", *common, *options)])
        rows.append(read_rows(out))
        options = ["--draft", root / "draft", "--data", root / "0.jsonl", "--json", file]
        told = eagle3([str(part) for part in ("doctor", *common, *options)])
        content = json.loads(file.read_text())
        found.append([done, told, *(content[key] for key in ("declared", "best", "accuracy_declared", "status"))])
    return {"rows": rows[0] == rows[1], "doctor": found[0] == found[1], "codes": [each[0] for each in found]}


def main(part: str, root: Path) -> dict:
    jax.monitoring.register_event_duration_secs_listener(count)
    folder = write_target(root / "target", seed=4, num_hidden_layers=1, **SMALL)
    one = e3.load_target(folder, "float32")
    draft = random_draft(one, taps=(0, 1), layer=SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2})
    quick = answers(one, draft, QUICK)
    if part == "quick":
        placement = Placement(parse_mesh("fsdp=2,tensor=2"))
        facts = {"even": placement.uneven("target", 4, 2), "uneven": placement.uneven("target", 9, 3)}
        facts |= {"words": placement.words, "loading": loading(root / "m")}
        return {"pair": compare(folder, draft, quick, "tensor=2", QUICK), **facts}
    expected = answers(one, draft, CASES)
    meshes = ("tensor=4", "tensor=8", "fsdp=2,tensor=2")
    pairs = {mesh: compare(folder, draft, expected, mesh, CASES) for mesh in meshes}
    target = e3.load_target(folder, "float32", mesh="tensor=2")
    return {"pairs": pairs, "engine": engine(target, draft.bind(target), quick[0]), "commands": commands(root)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
