# Dormouse: `make` lists the targets. The first that needs it makes .venv with pinned, tested versions.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
# Without an NVIDIA GPU the tested CPU build of torch is pinned; with one any torch >= 2.11 works, and the driver's
# bindings are installed too.
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo yes)
TORCH ?= $(if $(GPU),torch>=2.11,torch==2.13.0)
EXTRAS := demo,test$(if $(GPU),$(comma)gpu)
SECONDS_OF_DEMO ?= 30

.PHONY: help install demo test sim fuzz protocol test-fresh test-gpu lint types format check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/installed: pyproject.toml constraints.txt requirements-demo.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-demo.txt
	touch $@

install: $(VENV)/installed ## make .venv with everything

demo: $(VENV)/installed ## the main job: many real models, a small device, every answer checked
	$(BIN)/dormouse demo --seconds $(SECONDS_OF_DEMO)

test: $(VENV)/installed lint types ## lint, types and every test that needs no GPU
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term -m 'not gpu and not fresh'

sim: $(VENV)/installed ## 2,000 random histories of a small node with faults; a failure prints its seed
	$(BIN)/python -m dormouse.sim.campaign

fuzz: $(VENV)/installed ## 5,000 made-up requests over HTTP and over gRPC each; a failure prints how to repeat it
	DORMOUSE_FUZZ=5000 $(BIN)/python -m pytest --timeout 0 tests/shell/test_openapi.py tests/shell/test_grpc_fuzz.py

protocol: $(VENV)/installed ## compile the .proto files
	cd src/dormouse/gateway && $(abspath $(BIN))/python -m grpc_tools.protoc -I. --descriptor_set_out=protocol.binpb inference.proto health.proto

test-fresh: $(VENV)/installed ## the README's way from clone to an embedding, with an installation of its own
	$(BIN)/python -m pytest --timeout 0 tests/fresh -m fresh

test-gpu: ## the tests that need an NVIDIA GPU, with the python on the PATH
	$(PYTHON) -m pytest tests/gpu tests/contract -m gpu

lint: $(VENV)/installed ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed ## mypy, strict
	$(BIN)/mypy

format: $(VENV)/installed ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: test ## the same as test: one definition of sound

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
