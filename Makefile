# First target: what there is. Everything runs in .venv, which `make setup` makes; nothing else on the machine is touched.
SHELL := /bin/bash
.SHELLFLAGS := -e -o pipefail -c
.DEFAULT_GOAL := help

MODEL ?=
ARGS ?=
PEER_URL ?=
PEER_MODEL ?=
PYTHON ?= python3
TESTS ?= tests
TRACES ?= 1000
# Tests that stay within their process and may have others beside them; a file's tests run in one of two processes.
INSIDE := $(addprefix tests/,shared contract gateway scheduler_svc simulation kernels gpu_worker/engine \
	gpu_worker/model gpu_worker/sampling)

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# torch has a step of its own: its builds differ by machine. TORCH= takes another version, or the path of a wheel; what
# was chosen once stays chosen until `make clean`.
DEFAULT_TORCH := torch==2.13.0
TORCH ?= $(or $(shell cat $(STAMPS)/torch.chosen 2>/dev/null),$(DEFAULT_TORCH))
torch_stamp := $(STAMPS)/torch-$(subst /,_,$(subst =,-,$(subst ~,_,$(TORCH))))
PIP := $(BIN)/python -m pip --disable-pip-version-check --log $(VENV)/pip.log install --progress-bar off
# Quiet, not silent: what is large or slow is shown, the rest is in the log.
SHOW := sed -u -n -e 's/^ *\(Downloading .*[0-9] MB)\).*/  \1/p' -e 's/^\(Processing .*\)/  \1/p' \
	-e 's/^Installing collected packages.*/  installing/p' -e '/^ *ERROR/p'

.PHONY: help serve setup setup-local setup-dev test test-policy test-full test-slow golden lint type bench bench-gpu
.PHONY: kernels clean

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

serve: setup-local ## serve a model until Ctrl-C: MODEL=folder (default: SmolLM2-135M-Instruct), ARGS="--port 9000 ..."
	@exec $(BIN)/quire serve $(if $(MODEL),'$(MODEL)') $(ARGS)

setup: setup-local ## prepare everything that `make serve` needs, the default model too
	@$(BIN)/python -m quire.checkpoint $(if $(MODEL),'$(MODEL)') $(ARGS)

test: setup-dev ## all tests that are quick enough for every change (minutes)
ifeq ($(TESTS),tests)
	@code=0; OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(INSIDE) || code=$$?; \
	  $(BIN)/python -m pytest -m "not slow" $(addprefix --ignore=,$(INSIDE)) $(TESTS) || code=$$?; exit $$code
else
	@$(BIN)/python -m pytest -m "not slow" $(TESTS)
endif

test-policy: setup-dev ## properties of the scheduling policy on TRACES made-up cells each (default 1000), and its mutants
	@TRACES=$(TRACES) $(BIN)/python -m pytest --timeout=0 tests/simulation

test-full: setup-dev ## all tests
	@$(BIN)/python -m pytest $(TESTS)

test-slow: setup-dev ## what test-full has over test
	@$(BIN)/python -m pytest -m slow $(TESTS)

golden: setup-dev ## write the policy's decisions in small traces anew (tests/simulation/golden), to read as a diff
	@$(BIN)/python -m tests.simulation.golden

lint: setup-dev ## style; changes nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: setup-dev ## types
	@$(BIN)/mypy

bench: setup-local ## measure README's table (minutes): ARGS="--repeats 5"; PEER_URL=http://... [PEER_MODEL=...] beside it
	@$(BIN)/quire bench table $(if $(PEER_URL),--peer-url '$(PEER_URL)') $(if $(PEER_MODEL),--peer-model '$(PEER_MODEL)') $(ARGS)

bench-gpu: setup-local ## time each kernel on this machine's CUDA card, and decode; writes JSON: ARGS="--json FILE ..."
	@$(BIN)/quire bench gpu $(ARGS)

kernels: setup-local ## compile the CPU kernels beside their sources, for images (a worker compiles them by itself)
	@$(BIN)/python -m kernels.cpu.build

clean: ## remove .venv and caches of tools (models in ~/.cache/quire stay)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis quire.egg-info build

setup-local: $(STAMPS)/local
setup-dev: $(STAMPS)/dev

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is older than 3.11; say PYTHON=..." >&2; exit 1; }
	@echo "set-up: $(VENV) (seconds)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(torch_stamp): | $(STAMPS)/venv
	@echo "set-up: $(TORCH) (200 MB for a CPU build; about half a minute)"
	@$(PIP) '$(TORCH)' 2>&1 | $(SHOW) || { tail -n 5 $(VENV)/pip.log; exit 1; }
	@rm -f $(STAMPS)/torch-* && echo '$(TORCH)' >$(STAMPS)/torch.chosen && touch '$@'
	@[ '$(TORCH)' != '$(DEFAULT_TORCH)' ] || rm -f $(STAMPS)/torch.chosen

$(STAMPS)/local: pyproject.toml constraints.txt $(torch_stamp)
	@echo "set-up: the packages that serving needs (about 20 s)"
	@$(PIP) -c constraints.txt --editable '.[local]' 2>&1 | $(SHOW) || { tail -n 5 $(VENV)/pip.log; exit 1; }
	@touch $@

$(STAMPS)/dev: $(STAMPS)/local
	@echo "set-up: the packages that tests and checks need (about half a minute)"
	@$(PIP) -c constraints.txt --editable '.[local,dev]' 2>&1 | $(SHOW) || { tail -n 5 $(VENV)/pip.log; exit 1; }
	@touch $@
