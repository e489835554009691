"""Trains a draft: `python train.py --config configs/demo.yaml [a.b=c ...]`. The same as `eagle3 train`."""

import sys

from eagle3_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
