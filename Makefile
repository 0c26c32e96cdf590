# Everything a newcomer or a build server runs. `make` alone lists the targets.
#
# PYTHON picks the interpreter that builds the environment:    PYTHON=python3.12 make demo
#
# TORCH is the one place where torch is pinned. It goes in first, alone, so that it decides the build and the project
# leaves it as it is. Which build that is:
#   macOS, Windows     a plain install is the CPU build already.
#   Linux              a plain install takes the CUDA build, with several gigabytes of libraries, also on a machine
#                      without a GPU. For the CPU build give TORCH_INDEX the address that PyTorch's "Get Started" page
#                      shows after --index-url once you choose "Compute platform: CPU":
#                                                              TORCH_INDEX=<that address> make demo
# Either build works: what needs a GPU is offered only where there is one.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
TORCH_INDEX ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo test check-all lab bench compat clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## build the environment in .venv (once; again when pyproject.toml or the Makefile changes)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "specter_lab needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." \
	  "Name another one: PYTHON=python3.12 make $(or $(MAKECMDGOALS),venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
	  "An environment needs Python's venv module; '$(PYTHON)' has none. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==$(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet --editable ".[notebooks,dev]"
	@touch $@

demo: $(STAMP) ## the shortest tour: offloaded speculative decoding of the bundled model
	$(BIN)/python -m specter_lab demo

test: $(STAMP) ## style, types, tests, docstring examples, notebooks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -n 2 --dist loadfile tests specter_lab
	$(PYTEST) -n 2 --dist loadfile --nbval-lax --nbval-current-env --nbval-cell-timeout 120 notebooks/

check-all: $(STAMP) ## the exhaustive tests (minutes); the result is kept in build/check-all.txt
	@mkdir -p build
	{ date -u +%FT%TZ; git describe --always --dirty 2>/dev/null || true; $(BIN)/python --version; $(BIN)/python -m pip list 2>/dev/null; \
	  $(PYTEST) -m all tests; } 2>&1 | tee build/check-all.txt

lab: $(STAMP) ## JupyterLab on the notebooks, reachable from this computer only
	$(BIN)/jupyter lab --ip=127.0.0.1 --ServerApp.root_dir=notebooks

bench: $(STAMP) ## the benchmarks, into benchmarks/results and the README's tables
	for name in overhead host_memory pays residual loading gpu calibration replay_speed wall_clock cases no_host limits parts draft_length figures tables; do $(BIN)/python -m benchmarks.$$name; done

compat: $(STAMP) ## the seam's own tests with the installed versions; a row of notebooks/compat.md
	$(BIN)/python -m benchmarks.compat

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find specter_lab tests notebooks -name __pycache__ -prune -exec rm -rf {} +
