# `make demo` and `make test` need nothing but Python 3.11+ and make: they build .venv first, from
# the files named in INPUTS, and again whenever one of those changes.
#
#   PYTHON=python3.12 make test     another interpreter
#   PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu' make test
#                                   the smaller CPU build of torch, where pip's index has CUDA's

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= train-cpu,kernels,dev
PIP_FLAGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.hwplan-installed
SHIM := install/fbgemm-gpu-cpu-shim
CONSTRAINTS := install/constraints-cpu.txt
INPUTS := pyproject.toml $(CONSTRAINTS) $(SHIM)/pyproject.toml

LOCAL := cluster_configs/local.yaml
SMALL := dlrm_criteo_small

.PHONY: help demo test lint types format venv clean

help:
	@echo 'make demo    plan a mixed cluster, then train and compare on this machine'
	@echo 'make test    lint, types and the whole test suite'
	@echo 'make lint | types | format | venv | clean'

demo: $(STAMP)
	$(BIN)/hwplan plan --cluster cluster_configs/mixed.yaml --model dlrm
	$(BIN)/hwplan train --cluster $(LOCAL) --model $(SMALL) --data synthetic --steps 60
	$(BIN)/hwplan compare --cluster $(LOCAL) --model $(SMALL) --measure

test: lint types
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

venv: $(STAMP)

$(STAMP): $(INPUTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"hwplan needs Python 3.11 or newer, and {sys.executable} is {v[0]}.{v[1]}")' \
	    || { echo 'Name another one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    || $(PYTHON) -m venv --clear $(VENV)
	@echo 'Installing into $(VENV): some minutes the first time.'
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c $(CONSTRAINTS) --upgrade pip
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c $(CONSTRAINTS) ./$(SHIM) -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip check
	@touch $@

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
