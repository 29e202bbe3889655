# `make demo` and `make test` work from a fresh clone with Python >= 3.10; everything they install
# goes to .venv. Stamp files there say what has been installed, so a second run starts at once.
PYTHON ?= python3
HYPOTHESIS_PROFILE ?= ci
DEMO_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
VENV36 := .venv-triton36
# The report on compiled kernels is of this one; `make test-triton36` has the oldest.
TRITON := triton==3.9.0
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt
PARALLEL := -n $(WORKERS) --dist loadfile
# A test process uses one thread, and there is one for each core.
export OMP_NUM_THREADS := 1
export HYPOTHESIS_PROFILE

.DEFAULT_GOAL := help
.PHONY: help demo test test-cpu test-interpreter test-triton36 lint format bench compile-report dist clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo 'Installing into $(VENV): PyTorch is large, this takes minutes the first time.'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -e . $(TRITON)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]' $(TRITON)
	touch $@

$(VENV36)/.installed-dev: pyproject.toml constraints.txt
	test -x $(VENV36)/bin/python || $(PYTHON) -m venv $(VENV36)
	$(VENV36)/bin/python $(PIP_INSTALL) -e '.[dev]' triton==3.6.0
	touch $@

demo: $(VENV)/.installed ## install, then generate text with plain, fresh and shared drafts
	$(BIN)/lightning-indexer generate $(DEMO_ARGS)

test: test-cpu test-interpreter ## install, then run the tests on both backends

test-cpu: $(VENV)/.installed-dev ## PyTorch paths, layout, packaging, offline compilation
	$(BIN)/python -m pytest -q $(PARALLEL) $(PYTEST_ARGS)

test-interpreter: $(VENV)/.installed-dev ## the same properties through the Triton kernels
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q $(PARALLEL) $(PYTEST_ARGS)

test-triton36: $(VENV36)/.installed-dev ## kernels on the oldest Triton: values, then code
	TRITON_INTERPRET=1 $(VENV36)/bin/python -m pytest -q $(PARALLEL) $(PYTEST_ARGS)
	$(VENV36)/bin/python -m pytest -q tests/test_offline_compile.py $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev ## time the ops against plain PyTorch on this machine
	set -e; for script in bench/bench_*.py; do $(BIN)/python $$script $(BENCH_ARGS); done

compile-report: $(VENV)/.installed-dev ## rewrite the checked-in report on compiled kernels
	mkdir -p bench/compiled
	$(BIN)/lightning-indexer compile-report --json bench/compiled/report.json

dist: $(VENV)/.installed-dev ## sdist, and the wheel built from it, in dist/
	$(BIN)/python -m build --outdir dist .

clean: ## remove everything that make and the tools made
	rm -rf .venv .venv-triton36 build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
