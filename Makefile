# Two commands for a newcomer: `make demo` and `make test`. Each makes its own environment.
PYTHON ?= python3
TAG := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(TAG))
BIN := $(VENV)/bin
# The torch oracles come for the default Python; tests that need them skip elsewhere and say so.
COMMA := ,
EXTRAS := $(if $(filter 3.11,$(TAG)),dev$(COMMA)reference,dev)
PYTEST := $(BIN)/python -m pytest

.PHONY: venv dev demo serve test test-all kernels-all lint types docs deploy-check deploy-lock clean

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

docs: venv
	$(BIN)/python -m tpu_vl.flags > docs/flags.md

test: lint types
	$(PYTEST) tests
	JAX_PLATFORMS=cpu $(BIN)/tpu-vl accuracy --suite bundled

test-all: lint types
	$(PYTEST) tests -m ''
	JAX_PLATFORMS=cpu $(BIN)/tpu-vl accuracy --suite bundled --num-samples 300

.venv-deploy/.installed: deploy/check-requirements.txt
	$(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/python -m pip install --quiet --requirement $<
	touch $@

# Manifests and Dockerfile against the schemas and the linter that packages bring; no cluster.
deploy-check: .venv-deploy/.installed
	.venv-deploy/bin/python -m tests.deploy.check

# The image's packages, as pip resolves them today for the image's Python, and the jax whose TPU
# programs the tests compile.
LOCK := deploy/constraints.txt
LOCK_JAX := 0.10.2
deploy-lock:
	rm -rf .venv-lock
	python3.12 -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet '.[tpu]' 'jax[tpu]==$(LOCK_JAX)' setuptools
	{ grep '^#' $(LOCK); .venv-lock/bin/python -m pip freeze --all --exclude tpu-vl --exclude pip \
	  | sort --ignore-case; } > $(LOCK).new
	mv $(LOCK).new $(LOCK)
	rm -rf .venv-lock

# Every real shape of the kernels through the TPU compiler for every chip and, as one device has it,
# through the interpreter; and the marks. More than an hour of two cores; 8 GiB for each of JOBS.
JOBS ?= 2
kernels-all: dev
	$(PYTEST) tests/kernels tests/bench -m '' -n $(JOBS) --dist worksteal
	$(BIN)/python -m bench.kernels --marks

clean:
	rm -rf .venv-* .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
