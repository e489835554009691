"""Our trainer and its peers on the same data, in turns: `python bench/peers [--json FILE] [TRAINER ...]`.

    .venv/bin/python bench/peers                                   # ours, speculators, specjax
    .venv/bin/python bench/peers ours speculators:dtype=bfloat16   # one peer, with another option
    .venv/bin/python bench/peers --build                           # make the environments and the inputs only

One draft step of EAGLE-3 at SmolLM2-135M's shapes, the target's forward included in every step (teacher online):
three TTT steps, draft vocabulary 8192, KL, AdamW, documents of at most 512 tokens, 2048 tokens a step in rows of the
length that suits a trainer best (option row; SpecJAX: 4 rows of 512), on as many cores as there are, at most two. Each
trainer runs in its own environment and process, loads, compiles, takes some steps, and then all take turns; medians
over the turns are printed, with tokens that are no padding. train_*.py say what is not as the peers have it.
The environments are made on the first run (minutes, PyTorch and jax) in ~/.cache/eagle3_jax/peers.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that a checkout need not be installed

from bench.peers import comparison, environments, inputs  # noqa: E402
from bench.peers.turns import Trainer  # noqa: E402
from eagle3_jax.files import write_whole  # noqa: E402
from eagle3_jax.machine import describe_machine  # noqa: E402

# The fastest of each on a CPU without bf16 instructions (docs/performance.md).
OPTIONS = {
    "ours": {"dtype": "float32", "row": "512"},
    "speculators": {"dtype": "float32", "attention": "sdpa", "row": "2048"},
    "specjax": {"dtype": "float32"},
}
ANSWERS = ROOT / "eagle3_jax" / "bench" / "demo_answers" / "train.jsonl.gz"


def parse_trainer(text: str) -> tuple[str, dict[str, str]]:
    """`NAME:key=value,...` as (name, all its options). argparse.ArgumentTypeError for unknown ones."""
    name, _, given = text.partition(":")
    if name not in OPTIONS:
        raise argparse.ArgumentTypeError(f"no trainer {name!r}: {', '.join(OPTIONS)}")
    options = dict(pair.partition("=")[::2] for pair in given.split(",")) if given else {}
    if unknown := options.keys() - OPTIONS[name].keys():
        raise argparse.ArgumentTypeError(f"{name} has no option {min(unknown)!r}: {', '.join(OPTIONS[name])}")
    return name, OPTIONS[name] | options


def prepare(arguments: argparse.Namespace, scratch: Path) -> tuple[Path, dict[str, float]]:
    """The target's folder, kept in the cache, and what was written to `scratch` / inputs."""
    target = arguments.cache / "smollm2"
    if not target.exists():
        inputs.write_target(target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (scratch / "inputs").mkdir()
    counts = inputs.write_data(
        scratch / "inputs", ANSWERS, arguments.documents, arguments.length, arguments.vocabulary, config
    )
    return target, counts


def start(arguments: argparse.Namespace, scratch: Path, target: Path, job: dict[str, Any]) -> Trainer:
    """A trainer's process. job: its name, options and environment; the rest of what it reads is added here."""
    folder = Path(tempfile.mkdtemp(prefix=job["name"], dir=scratch))
    environment = job.pop("environment")
    shared = {key: getattr(arguments, key) for key in ("length", "rows", "ttt_steps", "vocabulary", "warm_up")}
    job |= shared | {"target": str(target), "inputs": str(scratch / "inputs"), "scratch": str(folder)}
    job |= {"threads": len(os.sched_getaffinity(0)), "turn_tokens": arguments.turn_tokens}
    job |= {"source": str(environment.source), "commit": environment.commit}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    variables = {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    script = Path(__file__).with_name(f"train_{job['name']}.py")
    command = [environment.interpreter, script, folder / "job.json"]
    label = ", ".join([job["name"], *job["options"].values()])
    return Trainer(label, command, os.environ | variables, folder / "log.txt")


def measure(arguments: argparse.Namespace, say) -> dict[str, Any]:
    """Everything: environments, inputs, warm-up, turns. Returns the report."""
    began = time.perf_counter()
    report: dict[str, Any] = {"command": shlex.join(sys.argv), "machine": describe_machine(), "failed": {}}
    jobs = []
    for name, options in arguments.trainers:
        try:
            build = environments.BUILD[name]
            environment = build(arguments.cache, arguments.torch_python, arguments.torch, arguments.specjax)
            jobs.append({"name": name, "options": options, "environment": environment})
        except RuntimeError as error:
            report["failed"][name] = str(error)
            say(f"{name} is left out: {error}")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        target, report["data"] = prepare(arguments, scratch)
        say(f"data: {json.dumps(report['data'])}")
        if arguments.build:
            return report
        trainers, about = [], {}
        try:
            for job in jobs:
                trainers.append(trainer := start(arguments, scratch, target, job))
                try:
                    about[trainer.name] = trainer.ready()
                    say(f"{trainer.name} is ready, {time.perf_counter() - began:.0f} s after the start")
                except RuntimeError as error:
                    report["failed"][trainer.name] = str(error)
                    say(str(error))
            ready = [trainer for trainer in trainers if trainer.name in about]
            results = comparison.take_turns(ready, arguments.turns, say)
        finally:
            for trainer in trainers:
                trainer.kill()
    report["trainers"] = {name: about[name] | result for name, result in results.items()}
    report["failed"] |= {name: result["failed"] for name, result in results.items() if "failed" in result}
    report["summary"] = comparison.summary(report["trainers"])
    report["seconds"] = time.perf_counter() - began
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    everyone = [parse_trainer(name) for name in OPTIONS]
    add("trainers", nargs="*", type=parse_trainer, default=everyone, metavar="TRAINER[:KEY=VALUE,...]")
    add("--turns", type=int, default=3)
    add("--turn-tokens", type=int, default=4000, help="a turn ends with the step that reaches so many")
    add("--warm-up", type=int, default=2, help="steps before the first turn")
    add("--rows", type=int, default=4, help="a step")
    add("--length", type=int, default=512, help="of a row")
    add("--ttt-steps", type=int, default=3)
    add("--vocabulary", type=int, default=8192, help="of the draft")
    add("--documents", type=int, default=600)
    add("--cache", type=Path, default=Path.home() / ".cache" / "eagle3_jax" / "peers", help="of environments, target")
    add("--torch", default="torch", help="pip requirement for PyTorch, say of a CPU build")
    add("--torch-python", default=sys.executable, help="interpreter of its environment")
    add("--specjax", default=environments.SPECJAX, help="where its repository is cloned from")
    add("--build", action="store_true", help="make environments and inputs, and measure nothing")
    add("--json", type=Path, help="also write the report there")
    arguments = parser.parse_args(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    report = measure(arguments, lambda line: print(line, file=sys.stderr, flush=True))
    if arguments.json:
        write_whole(arguments.json, json.dumps(report, indent=2) + "\n")
    if "summary" in report:
        print(f"`{report['command']}` on {report['machine']['processor']}, {report['machine']['cores']} cores\n")
        for name, trainer in report["trainers"].items():
            print(f"{name}: {', '.join(' '.join(pair) for pair in trainer['about']['versions'].items())}")
        print(f"\n{comparison.table(report['summary'])}")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
