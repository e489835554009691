"""Serves a target, with a draft speculatively, to OpenAI clients: `python serve.py --draft D`. As `eagle3 serve`."""

import sys

from eagle3_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
