# demo, test, lint, bench, clean. Each sets up .venv first, which needs Python 3.11 or newer and nothing else.
#
#   PYTHON=python3.12 make test       another interpreter for .venv
#   TORCH_INDEX_URL=... make demo     where pip takes torch (and only torch) from
#   make demo ARGS=--json             arguments for the command, also for test and bench

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Named after what it was installed from: a change of either file installs again, a mere checkout does not.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)

.PHONY: help demo test lint bench clean setup
.DEFAULT_GOAL := help

help:
	@echo "make demo   a long prompt answered twice, without and with the cache"
	@echo "make test   all tests; those that need a GPU are skipped where there is none"
	@echo "make lint   ruff, ruff format, mypy --strict"
	@echo "make bench  what the host part costs: hashing, matching, index memory"
	@echo "make clean  remove what was built; .venv stays (rm -r .venv removes it)"

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/kvtide demo $(ARGS)

# The script, not `python -m pytest`: that would put this folder first on the path, where our kernels/ hides
# the package of that name that transformers imports.
test: $(STAMP)
	$(BIN)/pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/kvtide bench core $(ARGS)

clean:
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	find app core kernels storage src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvtide needs Python 3.11 or newer, and '$(PYTHON)' is not one that runs." >&2; \
	  echo "Name another: PYTHON=python3.12 make $(or $(MAKECMDGOALS),setup)" >&2; exit 1; }
	@$(BIN)/pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@if [ -z "$(TORCH_INDEX_URL)" ] && ! $(BIN)/python -I -c 'import torch' 2>/dev/null \
	  && ! command -v nvidia-smi >/dev/null 2>&1 && [ ! -e /dev/nvidia0 ]; then \
	  echo "No NVIDIA GPU here, and TORCH_INDEX_URL is not set: pip may now fetch a CUDA build of PyTorch,"; \
	  echo "several GB that this machine cannot use. For the small build, stop this and run"; \
	  echo "    TORCH_INDEX_URL=<URL of the CPU wheel index of PyTorch> make $(or $(MAKECMDGOALS),setup)"; \
	  echo "Going on without it."; \
	fi
	@# Only torch itself comes from there; what it needs comes with the rest, in the tested versions.
	@if [ -n "$(TORCH_INDEX_URL)" ]; then \
	  $(BIN)/pip install --quiet --no-deps --index-url "$(TORCH_INDEX_URL)" "$$(grep '^torch==' constraints.txt)"; \
	fi
	$(BIN)/pip install --quiet -e '.[test,transformers]' -c constraints.txt
	@rm -f $(VENV)/.installed-*
	@touch $@
