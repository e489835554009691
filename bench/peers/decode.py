"""Plain decoding of one stream against Hugging Face transformers (PyTorch), in turns, bfloat16, greedy:

    python bench/peers/decode.py TARGET_FOLDER --peer PYTHON [--turns 7] [--new 64]

TARGET_FOLDER: a Hugging Face folder. PYTHON: an interpreter of another environment, which has torch and transformers;
`python bench/peers --build` makes one, and the folder of SmolLM2-135M as well, in ~/.cache/eagle3_jax/peers. A turn is
the time of an answer of `--new` tokens less that of one token, a token; medians of all turns are printed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a checkout need not be installed

_PROMPT = list(range(1000, 1032))


def ms_per_token(answer: Callable[[int], None], new: int) -> float:
    """answer: makes so many tokens after the prompt."""
    begin = time.perf_counter()
    answer(1)
    middle = time.perf_counter()
    answer(new)
    return 1e3 * (time.perf_counter() - middle - (middle - begin)) / (new - 1)


def ours(folder: str) -> Callable[[int], None]:
    import eagle3_jax as e3

    target = e3.load_target(folder, dtype="bfloat16")

    def answer(new: int) -> None:
        tokens = e3.generate(target, None, _PROMPT, max_new_tokens=new, strategy="plain", stop_token_ids=()).tokens
        assert len(tokens) == new

    return answer


def transformers(folder: str, threads: int) -> Callable[[int], None]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    prompt = torch.tensor([_PROMPT])

    def answer(new: int) -> None:
        with torch.inference_mode():
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=new, max_new_tokens=new
            )
        assert tokens.shape[1] == len(_PROMPT) + new

    return answer


def peer(folder: str, new: int, threads: int) -> None:
    """A turn for each line of the standard input."""
    answer = transformers(folder, threads)
    answer(new)
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    print(json.dumps(versions), flush=True)
    for _ in sys.stdin:
        print(json.dumps(ms_per_token(answer, new)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--peer", help="interpreter of an environment with torch and transformers")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="of the peer")
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_peer:
        peer(args.target, args.new, args.threads)
        return
    command = [args.peer, __file__, args.target, "--as-peer", "--new", str(args.new), "--threads", str(args.threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        versions, answer = json.loads(other.stdout.readline()), ours(args.target)
        for count in (1, args.new):
            answer(count)  # compiles
        mine, theirs = [], []
        for _ in range(args.turns):
            mine.append(ms_per_token(answer, args.new))
            print("turn", file=other.stdin, flush=True)
            theirs.append(json.loads(other.stdout.readline()))
        other.stdin.close()
    import jax

    words = ", ".join(f"{name} {version}" for name, version in ({"jax": jax.__version__} | versions).items())
    for name, turns in (("ours", mine), ("transformers", theirs)):
        print(f"{name}: {statistics.median(turns):.1f} ms a token ({' '.join(f'{ms:.1f}' for ms in turns)})")
    ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
    print(f"{ratio:.2f}x as fast as transformers, median of the turns' ratios ({words})")


if __name__ == "__main__":
    main()
