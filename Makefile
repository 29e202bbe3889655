# `make demo` and `make test` work from a fresh clone with Python >= 3.10; everything they install
# goes to .venv. Stamp files there say what has been installed, so a second run starts at once.
PYTHON ?= python3
HYPOTHESIS_PROFILE ?= ci
DEMO_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
BENCH_ARGS ?=
SINS_ARGS ?=
PEERS_ARGS ?=
MUTATE_ARGS ?=
VERIFY_ARGS ?=
SOAK_MINUTES ?= 60
SOAK_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
VENV36 := .venv-triton36
VENV_HF := .venv-transformers
VENV_CLIENTS := .venv-clients
# The report on compiled kernels is of this one; `make test-triton36` has the oldest.
TRITON := triton==3.9.0
# vLLM brings gigabytes of CUDA libraries and, if they clash, silently an older version of itself: its
# wheel is taken alone, beside what its Python needs to be imported on a CPU.
KERNELS := kernels==0.17.2 transformers==5.24.0
VLLM := vllm==0.33.0 xgrammar==0.2.8 llguidance==1.7.6 apache-tvm-ffi==0.1.11
VLLM_NEEDS := aiohttp blake3 cachetools cbor2 cloudpickle fastapi msgspec openai oss-harmony \
	partial-json-parser pillow prometheus-client psutil py-cpuinfo pybase64 pydantic pyzmq uvloop
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt
PARALLEL := -n $(WORKERS) --dist loadfile
# A test process uses one thread, and there is one for each core.
export OMP_NUM_THREADS := 1
export HYPOTHESIS_PROFILE

.DEFAULT_GOAL := help
.PHONY: help demo test test-cpu test-interpreter test-triton36 test-transformers test-clients sins mutate verify verify-quick peers soak lint format bench compile-report dist clean

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

$(VENV_HF)/.installed: pyproject.toml constraints.txt
	test -x $(VENV_HF)/bin/python || $(PYTHON) -m venv $(VENV_HF)
	$(VENV_HF)/bin/python $(PIP_INSTALL) -e '.[dev,hf]' $(TRITON)
	touch $@

$(VENV_CLIENTS)/.installed: pyproject.toml constraints.txt
	test -x $(VENV_CLIENTS)/bin/python || $(PYTHON) -m venv $(VENV_CLIENTS)
	$(VENV_CLIENTS)/bin/python $(PIP_INSTALL) -e '.[dev]' $(TRITON) $(KERNELS) $(VLLM_NEEDS)
	$(VENV_CLIENTS)/bin/python $(PIP_INSTALL) --no-deps $(VLLM)
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

test-transformers: $(VENV_HF)/.installed ## the adapter for transformers, with the real package
	$(VENV_HF)/bin/python -m pytest -q $(PARALLEL) tests/clients/test_transformers*.py $(PYTEST_ARGS)

test-clients: test-transformers $(VENV_CLIENTS)/.installed ## those for transformers, Hugging Face kernels and vLLM (3.3 GB)
	$(VENV_CLIENTS)/bin/python -m pytest -q tests/clients/test_huggingface_kernels.py $(PYTEST_ARGS)
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(VENV_CLIENTS)/bin/python -m pytest -q $(PARALLEL) \
		tests/clients/test_vllm_*.py $(PYTEST_ARGS)

sins: $(VENV)/.installed-dev ## commit every known sin in a copy of the tree: tests must reject each
	PYTHONPATH=tests $(BIN)/python -m sins $(SINS_ARGS)

mutate: $(VENV)/.installed-dev ## run all mutants of the three folders: hours; goes on where it was cut off
	PYTHONPATH=tests $(BIN)/python -m mutation --jobs $(WORKERS) \
		--json tests/mutation/results.jsonl $(MUTATE_ARGS)

verify: $(VENV)/.installed-dev ## every reliability figure, and whether each promise holds
	PYTHONPATH=tests $(BIN)/python -m verify $(VERIFY_ARGS)

verify-quick: $(VENV)/.installed-dev ## a part of it, in minutes
	PYTHONPATH=tests $(BIN)/python -m verify --quick $(VERIFY_ARGS)

peers: $(VENV_CLIENTS)/.installed ## the test kit on torch, transformers and vLLM (3.3 GB)
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= OPENBLAS_NUM_THREADS=1 PYTHONPATH=tests \
		$(VENV_CLIENTS)/bin/python -m peers $(PEERS_ARGS)

soak: $(VENV)/.installed-dev ## all properties under random seeds, for SOAK_MINUTES
	$(BIN)/python tests/soak.py --minutes $(SOAK_MINUTES) $(SOAK_ARGS)

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
	rm -rf .venv .venv-* build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
