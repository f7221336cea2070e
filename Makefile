# Sets up .venv once (and again when pyproject.toml or constraints.txt change), then does what is asked.
#     make demo     tunes configs/quickstart.yaml on this machine
#     make test     runs the tests
#     make test-gpu runs those that need a CUDA device, and says of each how it went; without one it fails

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start dozens of interpreters; what is compiled is kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu lint notebooks clean

help:
	@echo "make demo        tune configs/quickstart.yaml on this machine, from the start"
	@echo "make test        run the tests"
	@echo "make test-gpu    run the tests that need a CUDA device, one after the other"
	@echo "make lint        ruff check, ruff format --check, lint-imports, mypy --strict"
	@echo "make notebooks   execute every notebook; an error in a cell fails"
	@echo "make setup       only set up $(VENV)"
	@echo "make clean       remove $(VENV), caches and builds; runs/ and configs/data/ stay"
	@echo "PYTHON=python3.12 make ...   choose the interpreter; make clean first"

setup: $(READY)

demo: $(READY)
	$(BIN)/autotune run configs/quickstart.yaml --fresh

test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not quiet and not gpu' --durations 15
	$(BIN)/python -m pytest -m 'quiet or gpu' --durations 15

test-gpu: $(READY)
	AUTOTUNE_TEST_GPU=1 $(BIN)/python -m pytest -m gpu --verbose --durations 0 --durations-min 1 tests/worker

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

notebooks: $(READY)
	@set -e; for notebook in notebooks/*.ipynb; do \
		echo "executing $$notebook"; \
		$(BIN)/jupyter-execute --timeout=300 --kernel_name=python3 "$$notebook"; \
	done

clean:
	rm -rf $(VENV) build dist .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find autotune benchmarks configs tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "autotune needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[examples,report,ray,dev]'
	@touch $@
