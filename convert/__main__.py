"""`python -m convert SRC DST --to FORMAT` and `python -m convert inspect SRC`: the commands of `eagle3`."""

import sys

from eagle3_jax.cli.main import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(arguments if arguments[:1] == ["inspect"] else ["convert", *(arguments or ["--help"])]))
