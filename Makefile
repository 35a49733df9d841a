# `make` alone lists the targets. Python 3.11, make and git are all that has to be there beforehand.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
READY := $(VENV)/.ready
ENGINE_PYTHON ?= python
PARALLEL ?= --numprocesses auto --maxprocesses 4 --dist loadfile

# Stages run `python`, and dvc starts them through a shell: the environment's own has to come first.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export VIRTUAL_ENV := $(abspath $(VENV))
# An environment of the caller's must not leak in.
unexport PYTHONPATH PYTHONHOME
export PYTHONHASHSEED := 0
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_TELEMETRY := 1
export DVC_NO_ANALYTICS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

$(VENV)/bin/python:
	@command -v "$(PYTHON)" >/dev/null || { echo 'no python3.11 or python3 found: install one, or make PYTHON=/path/to/python3.11' >&2; exit 1; }
	"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Python %d.%d found at %s; 3.11 or newer is needed: make PYTHON=/path/to/python3.11" % (v[0], v[1], sys.executable))'
	"$(PYTHON)" -m venv "$(VENV)" || { rm -rf "$(VENV)"; echo 'the venv module is missing or broken (Debian: install python3.11-venv)' >&2; exit 1; }

# The stamp is rewritten only when a pin or the package's metadata changed.
$(READY): requirements.lock pyproject.toml | $(VENV)/bin/python
	python -m pip install --quiet -r requirements.lock
	python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch "$@"

.PHONY: install
install: $(READY)  ## make .venv and install the pinned environment (only when the lock changed)

.PHONY: repro
repro: $(READY)  ## rebuild whatever is out of date, from text to report
	dvc repro

.PHONY: test
test: $(READY)  ## unit tests, then the whole pipeline on a tiny model (a few minutes on two cores)
	python -m pytest $(PARALLEL) tests/pipeline tests/unit $(ARGS)

.PHONY: test-unit
test-unit: $(READY)  ## unit tests only
	python -m pytest $(PARALLEL) tests/unit $(ARGS)

.PHONY: test-engines
test-engines: $(READY)  ## tests against real serving engines, under ENGINE_PYTHON; skipped where vLLM is not installed
	$(ENGINE_PYTHON) -m pytest tests/engines $(ARGS) || [ $$? -eq 5 ]

.PHONY: lint
lint: $(READY)  ## ruff format and check, mypy
	ruff format --check .
	ruff check .
	mypy

.PHONY: format
format: $(READY)  ## let ruff rewrite what it can
	ruff check --fix-only .
	ruff format .

.PHONY: deps
deps: $(READY)  ## rewrite the code dependencies in dvc.yaml from what the stages import
	python -m tools.sync_deps

.PHONY: readme
readme: $(READY)  ## write the figures of README.md from reports/ and recipes/
	python -m tools.readme_figures

# A variable's value if it was given to make itself: some shells export NAME.
given = $(if $(filter command line,$(origin $(1))),$($(1)))

.PHONY: recipe
recipe: $(READY)  ## write params.yaml from recipes/NAME.yaml and print what changed; without NAME, list the recipes
	python -m tools.recipe $(call given,NAME) $(if $(call given,FORCE),--force)

.PHONY: recipe-costs
recipe-costs: $(READY)  ## what every recipe needs in GPU memory, disk and time: an estimate from counted work
	python -m tools.recipe_costs

.PHONY: ablations
ablations: $(READY)  ## an experiment for each of several losses, heads and initialisations, into reports/ablations.* (hours)
	python -m tools.ablations run
	python -m tools.ablations collect

.PHONY: cotraining
cotraining: $(READY)  ## heads co-trained with a distilled student against post-hoc ones, into reports/cotraining.* (hours)
	python -m tools.cotraining $(ARGS)

.PHONY: hooks
hooks: $(READY)  ## run the linters before each commit
	pre-commit install

# Exact pins of a fresh installation. Local suffixes (+cpu) and the packages that a CUDA build of
# torch pulls in by itself are left out, so one lock serves both kinds of machine.
.PHONY: lock
lock:  ## resolve requirements.in afresh and rewrite requirements.lock
	scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT
	"$(PYTHON)" -m venv "$$scratch/venv"
	"$$scratch/venv/bin/python" -m pip install --quiet -r requirements.in
	{
	  echo '# The whole environment, pinned: `pip install -r requirements.lock`.'
	  echo '# Written by `make lock` from requirements.in; edit that file instead.'
	  "$$scratch/venv/bin/python" -m pip list --format=freeze \
	    | sed -E 's/\+[A-Za-z0-9.]+$$//' | grep -vE '^(pip|triton|nvidia-.*|cuda-.*)=='
	} > requirements.lock.new
	mv requirements.lock.new requirements.lock

.PHONY: clean
clean:  ## remove what the pipeline and the tools made; downloads, DVC's cache and .venv stay
	rm -rf data/shards data/distill data/hidden models build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src stages tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
