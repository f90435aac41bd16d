# Two commands for a newcomer: `make demo` and `make test`. Each makes its own environment.
PYTHON ?= python3
TAG := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(TAG))
BIN := $(VENV)/bin
# The torch oracles come for the default Python; tests that need them skip elsewhere and say so.
COMMA := ,
EXTRAS := $(if $(filter 3.11,$(TAG)),dev$(COMMA)reference,dev)
PYTEST := $(BIN)/python -m pytest

.PHONY: venv dev demo serve test test-all lint types clean

venv: $(VENV)/.installed
dev: $(VENV)/.dev

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

demo: venv
	$(BIN)/tpu-vl demo

serve: venv
	$(BIN)/tpu-vl serve

lint: dev
	$(BIN)/ruff check . kernels precompile
	$(BIN)/ruff format --check . kernels precompile

types: dev
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint types
	$(PYTEST) tests
	JAX_PLATFORMS=cpu $(BIN)/tpu-vl accuracy --suite bundled

test-all: lint types
	$(PYTEST) tests -m ''
	JAX_PLATFORMS=cpu $(BIN)/tpu-vl accuracy --suite bundled --num-samples 300

clean:
	rm -rf .venv-* .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
