# Sets up .venv once (and again when pyproject.toml or constraints.txt change), then does what is asked.
#     make demo     tunes configs/quickstart.yaml on this machine
#     make test     runs the tests that every change must pass; make test-all runs all of them
#     make test-gpu runs those that need a CUDA device, and says of each how it went; without one it fails
#     make integration runs those that hold our exports against accelerate, in .venv
#     make integrations runs the tests that hold us against the frameworks of others, in a venv of their own
#     make docs     builds the site
#     make dist     builds wheel and sdist, and tries both

PYTHON ?= python3
VENV := .venv
INTEGRATIONS := .venv-integrations
# Files with tests that run while no other does; to import all others takes half a minute.
ALONE = $(shell grep -rlE 'mark\.(quiet|gpu)\b' --include='test_*.py' tests)
# Frameworks that can't stand beside our torch: exports are held against the sources in their wheels.
SOURCES := axolotl==0.19.0 mosaicml==0.32.1 ultralytics==8.4.190
TENSORFLOW := .venv-tensorflow
OLDEST := .venv-oldest
TF_TESTS := tests/integrations/test_tf_data.py tests/integrations/test_tf_data_measured.py
NEWER := python3.12 python3.13 python3.14
# Most of what is installed is never imported: to compile all of it takes longer than to install it.
INSTALL := -m pip install --quiet --no-compile
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Seconds of the demo.
DEMO_S ?= 150

# A file's tests stay together, in order. A process that dies ends the run: xdist never ends if it replaces one.
DIST := --dist loadfile --no-loadscope-reorder --max-worker-restart 0

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start dozens of interpreters; what is compiled is kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-integrations demo test test-all test-gpu integration integrations integrations-frameworks integrations-tensorflow lint docs notebooks dist audit oldest pythons clean

help:
	@echo "make demo        tune configs/quickstart.yaml on this machine, from the start"
	@echo "make test        run the tests that every change must pass"
	@echo "make test-all    run all tests, those of the benchmarks and those that judge a measurement too"
	@echo "make test-gpu    run the tests that need a CUDA device, one after the other"
	@echo "make integration run the tests of our exports that need accelerate"
	@echo "make integrations  run the tests that need accelerate, Lightning, transformers, ... (gigabytes to fetch)"
	@echo "make lint        ruff check, ruff format --check, lint-imports, mypy --strict; then a report of tokens"
	@echo "make docs        build the site into build/docs; a broken link fails"
	@echo "make notebooks   execute every notebook; an error in a cell fails"
	@echo "make dist        build wheel and sdist into dist/, and try both in an environment of their own"
	@echo "make audit       list licences, and ask for known weaknesses of the pinned packages (needs pypi.org)"
	@echo "make oldest      run the tests with the oldest versions that pyproject.toml allows (gigabytes to fetch)"
	@echo "make pythons     run the tests with each newer Python that is installed (gigabytes each)"
	@echo "make setup       only set up $(VENV)"
	@echo "make clean       remove all virtual environments, caches and builds; runs/ and configs/data/ stay"
	@echo "PYTHON=python3.12 make ...   choose the interpreter; make clean first"

setup: $(READY)

demo: $(READY)
	$(BIN)/autotune run configs/quickstart.yaml --fresh --set budget.timeout_s=$(DEMO_S)

test: $(READY)
	$(BIN)/python -m pytest -n 2 $(DIST) -m 'not slow and not gpu and not integrations' \
		--durations 15

test-all: $(READY)
	$(call run-tests,$(BIN))

define run-tests
	$(1)/python -m pytest -n 2 $(DIST) -m 'not quiet and not gpu and not integrations' \
		--hypothesis-profile thorough --durations 15
	$(1)/python -m pytest -m 'quiet or gpu' --durations 15 $(ALONE)
endef

test-gpu: $(READY)
	AUTOTUNE_TEST_GPU=1 $(BIN)/python -m pytest -m gpu --verbose --durations 0 --durations-min 1 tests/worker

integration: $(READY)
	$(BIN)/python -m pytest -m integrations -k accelerate --durations 5 tests/integrations/test_exports.py

integrations: integrations-frameworks integrations-tensorflow

setup-integrations: $(INTEGRATIONS)/.ready build/sources/.ready

integrations-frameworks: setup-integrations
	$(INTEGRATIONS)/bin/python -m pytest -n 2 --dist loadfile -m integrations $(TF_TESTS:%=--ignore=%) \
		--hypothesis-profile thorough --durations 10 tests/integrations
	$(INTEGRATIONS)/bin/python -m pytest -n 2 --dist loadfile --durations 10 tests/worker/script/test_scripts.py \
		tests/worker/script

integrations-tensorflow: $(TENSORFLOW)/.ready
	$(TENSORFLOW)/bin/python -m pytest -m integrations --hypothesis-profile thorough --durations 10 $(TF_TESTS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python .ci/token_report.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(READY)
	@set -e; for notebook in notebooks/*.ipynb; do \
		echo "executing $$notebook"; \
		$(BIN)/jupyter-execute --timeout=300 --kernel_name=python3 "$$notebook"; \
	done

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python .ci/try_package.py dist

audit: $(READY)
	$(BIN)/python .ci/licences.py
	@$(BIN)/uvx pip-audit --strict --no-deps --disable-pip --requirement constraints.txt || { \
		echo "a pinned package has a known weakness, or pypi.org could not be asked: see above" >&2; exit 1; }

oldest: $(READY)
	mkdir -p build
	$(BIN)/uv pip compile --quiet --resolution lowest-direct --python-version 3.11 --no-header --no-annotate \
		--extra examples --extra ray --extra report --output-file build/oldest.txt pyproject.toml
	rm -rf $(OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(INSTALL) --requirement build/oldest.txt
	$(OLDEST)/bin/python $(INSTALL) --constraint build/oldest.txt --editable '.[examples,ray,test]'
	$(call run-tests,$(OLDEST)/bin)

pythons:
	@set -e; for python in $(NEWER); do \
		if $$python -c '' 2>/dev/null; then $(MAKE) PYTHON=$$python VENV=.venv-$$python test-all; \
		else echo "$$python is not installed, and not tried"; fi; \
	done

clean:
	rm -rf $(VENV) $(INTEGRATIONS) $(TENSORFLOW) $(OLDEST) $(NEWER:%=.venv-%) build dist .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find autotune benchmarks configs tests -name __pycache__ -type d -prune -exec rm -rf {} +

# TensorFlow has a venv of its own: what it allows of protobuf and NumPy is to hold up none of the others.
$(TENSORFLOW)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TENSORFLOW)
	$(TENSORFLOW)/bin/python $(INSTALL) --constraint constraints.txt --editable '.[tensorflow,test]'
	@touch $@

$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python $(INSTALL) --constraint constraints.txt --editable '.[integrations,test]'
	@touch $@

build/sources/.ready: $(INTEGRATIONS)/.ready
	$(INTEGRATIONS)/bin/python -m pip download --quiet --no-deps --only-binary :all: --dest build/sources $(SOURCES)
	@touch $@

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "autotune needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[examples,ray,dev]'
	@touch $@
