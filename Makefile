# The commands of this project, the same for a person and for CI.
# Everything is installed into .venv in this checkout; nothing outside it is touched.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.hocket-installed

# A relative name: the checkout may lie in a folder whose name holds spaces.
# `make test TESTS=tests/spec` runs a part; `make demo DEMO='--steps 20'` passes flags on.
# Ranks mostly wait for each other: two files of tests at once take two thirds of the time.
TESTS ?=
JOBS ?= 2
DEMO ?=
BENCH ?=

.PHONY: help setup demo test test-all test-base test-newest test-gpu docs check bench

help: ## list these commands
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)$$/  make \1\t\2/p' Makefile | expand -t 20

setup: $(STAMP) ## make .venv and install everything into it

# A checkout that was moved or copied finds its .venv pointing elsewhere: install again.
ifneq ($(shell cat $(STAMP) 2> /dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

# The stamp is written last: an interrupted install is done again, a finished one is not.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "hocket needs Python 3.11 or newer; say which with: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@if $(BIN)/python -m pip --version > /dev/null 2>&1; then :; else $(PYTHON) -m venv --clear $(VENV); fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,serve,lora,trackers,report,dev]'
	@pwd > $(STAMP)

demo: $(STAMP) ## train a small Llama on eight ranks, end to end, in under four minutes
	$(BIN)/python -m hocket demo --full $(DEMO)

# Of the tests that take long a part, chosen by the commit (tests/rotation.py).
test: $(STAMP) ## run the tests, of long ones and of similar cases a part
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(TESTS)

# Several times as long.
test-all: $(STAMP) ## run all tests and all cases: before a release
	HOCKET_TESTS=all $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(TESTS)

# Installed as a user would, not editable: this also sees what a wheel leaves out. A wheel takes what
# it finds in build/, stale files too, so that goes first.
test-base: ## the tests that need neither torch nor transformers, in a .venv-base without them
	rm -rf build
	$(PYTHON) -m venv --clear .venv-base
	.venv-base/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt '.[dev]'
	.venv-base/bin/python -m pytest -m "not train and not torch and not ranks and not gpu" $(TESTS)

# What pip gives a user today: on Linux torch is a CUDA build, of several GB. No GPU is needed.
NEWEST := torch|triton|torchao|nvidia-ml-py
test-newest: ## the tests with the newest torch and Triton, in .venv-newest: each week, and before a release
	$(PYTHON) -m venv --clear .venv-newest
	grep -vE '^($(NEWEST))==' constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-newest/constraints.txt --editable '.[train,serve,lora,fp8,trackers,report,dev]'
	.venv-newest/bin/python -m pytest -n $(JOBS) --dist loadfile $(TESTS)

test-gpu: $(STAMP) ## the GPU tests; each is skipped, with a reason, where its GPUs are missing
	$(BIN)/python -m pytest -m gpu tests/gpu $(TESTS)

docs: $(STAMP) ## build the documentation as static pages, into site/
	$(BIN)/python -m mkdocs build --strict

check: $(STAMP) ## lint, format and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: $(STAMP) ## measure hocket compared with its peers; writes JSON and prints a table
	$(BIN)/python -m benchmarks.peers $(BENCH)
