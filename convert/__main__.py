"""`python -m convert SRC DST --to FORMAT` is `eagle3 convert`, and `python -m convert inspect SRC` is `eagle3 inspect`."""

import sys

from eagle3_jax.cli.main import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(arguments if arguments[:1] == ["inspect"] else ["convert", *(arguments or ["--help"])]))
