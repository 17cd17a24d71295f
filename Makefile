# Every target sets up what it needs by itself; all of it stays in .venv/ and build/.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

SUDO   := $(shell test "$$(id -u)" = 0 || command -v sudo)

.PHONY: help setup demo up test test-faults test-large test-compose test-ui check bench-calibration bench-sampling bench-placement bench-pipeline bench-batching bench-page constraints clean

help:          ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 16

setup: $(READY) ## make the virtual environment with the pinned dependencies

# A new environment only when the pins or the project's own needs have changed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "brim needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' \
	  || { echo "$(PYTHON) cannot make virtual environments: on Debian, apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## run the main job: 300 tasks on four simulated GPUs, with a summary
	$(BIN)/brim demo $(ARGS)

up: $(READY)    ## start the whole stack and leave it running until Ctrl-C
	$(BIN)/brim up $(ARGS)

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

test-large: $(READY) ## run the tests that take minutes: a group of 10,000, other result backends, outages of 30 s, storms without a guard, a fail-over under load, rights
	$(BIN)/python -m pytest -m large $(ARGS)

test-compose: $(READY) ## run docker-compose.yml on a Docker engine: health, tasks, scaling, kills (skips without one)
	$(BIN)/python -m pytest -m compose -s tests/compose $(ARGS)

test-ui: $(READY) ## run the page in a real browser and the API against its own document; pictures in build/ui
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq --no-install-recommends chromium chromium-driver; }
	$(BIN)/python -m pytest tests/ui $(ARGS)

STORM_SECONDS ?= 60
SEED ?= 1
STORM_GPUS ?= 1

test-faults: $(READY) ## a random storm of faults: make test-faults STORM_SECONDS=600 SEED=1
	@PYTHONPATH=tests $(BIN)/python -m faults.storm --seconds $(STORM_SECONDS) --seed $(SEED) --gpus $(STORM_GPUS)

check: $(READY) ## lint, types, import layers, and the wheel in a clean environment
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/packaging/check_wheel.py

bench-calibration: $(READY) ## how wrong tables are put right by measured peaks: out-of-memory rate and over-reservation
	$(BIN)/python tests/benchmarks/bench_calibration.py $(ARGS)

bench-sampling: $(READY) ## what following memory costs: CPU share at 8 GPUs with 8 processes each
	$(BIN)/python tests/benchmarks/bench_sampling.py $(ARGS)

bench-pipeline: $(READY) ## what brim costs: the same tasks through plain Celery and through brim, in turn
	$(BIN)/python tests/benchmarks/bench_pipeline.py $(ARGS)

bench-placement: $(READY) ## decisions and commits per second, and 100,000 waiting tasks; needs the openb trace (ARGS="--trace DIR")
	$(BIN)/python tests/benchmarks/bench_placement.py $(ARGS)

bench-batching: $(READY) ## batches against plain Celery and a fixed batcher, from rest to 150 % of what a GPU can do
	$(BIN)/python tests/benchmarks/bench_batching.py $(ARGS)

bench-page: $(READY) ## the page with 1,600 simulated GPUs: frames, long tasks, memory over 30 s
	$(BIN)/python tests/benchmarks/bench_page.py $(ARGS)

constraints:    ## pin the newest versions that fit pyproject.toml
	rm -rf build/constraints && $(PYTHON) -m venv build/constraints
	build/constraints/bin/pip install --quiet --editable '.[dev]'
	{ sed -n '/^#/p' constraints.txt; build/constraints/bin/pip freeze --exclude-editable; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean:          ## remove everything that make made
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .brim
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
