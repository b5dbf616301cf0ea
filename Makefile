# `make run` is all it takes; `make help` lists the rest.
# Everything is installed into .venv, at the versions of constraints.txt, and again when those change.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := .venv/bin
PROMPT ?= What is Baton?
ARGS ?=
# Python 3.11 first: it is what CI runs.
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3 python)
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

.PHONY: help run test test-deep lint docs proto gpu bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 11
	@echo
	@echo 'Options go into ARGS: make run ARGS="--port 9000", make test ARGS="-k router -x".'

run: .venv/.worker  ## start a ring with the demo model, ask it PROMPT, keep serving on 127.0.0.1:8000
	@exec $(BIN)/baton up --prompt "$(PROMPT)" $(ARGS)

# What is compiled for one process of the tests need not be for the next, whatever the environment says.
test test-deep: export PYTHONDONTWRITEBYTECODE :=
test: .venv/.dev  ## run the tests that need no GPU and few minutes: every feature once, through the ring
	@scripts/test-servers
	$(BIN)/python -m scripts.phases $(ARGS)

test-deep: .venv/.dev  ## run the tests that take longer, which `make test` leaves out
	@scripts/test-servers
	$(BIN)/python -m scripts.phases --deep $(ARGS)

lint: .venv/.dev  ## check style, types, generated code and import arrows
	scripts/check

docs: .venv/.docs  ## build the documentation as a site, build/site, and check its links
	$(BIN)/python -m scripts.site

proto: .venv/.dev  ## generate services/baton/v1 from proto/
	scripts/proto

# A machine with a GPU may have torch and no network: where .venv is not there, the interpreter at hand serves.
gpu:  ## run what needs a CUDA device: its tests, then all that is measured; fails where there is none
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(or $(PYTHON),python3)) -m loadtest.gpu $(ARGS)

bench: .venv/.dev  ## measure the demo ring under load
	$(BIN)/python -m loadtest.first_light $(ARGS)

clean:  ## remove everything that was installed or built
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find services kernels tests loadtest scripts -name __pycache__ -prune -exec rm -rf {} +

.venv/.created:
	@for python in $(PYTHONS); do \
		if "$$python" -c '$(USABLE)' 2>/dev/null; then exec "$$python" -m venv .venv; fi; \
	done; \
	echo "Baton needs Python 3.11, 3.12 or 3.13 with its venv module (on Debian and Ubuntu: the package" \
		"python3-venv). Tried: $(PYTHONS). Name another with: make PYTHON=/path/to/python" >&2; \
	exit 1
	@touch $@

# Serving needs less than developing, and whoever only wants to see it run should not wait for the rest, nor for
# the compilation of all of torch: a start compiles what it imports, and the next finds it compiled.
.venv/.worker: .venv/.created pyproject.toml constraints.txt
	$(BIN)/pip install --no-compile -e '.[worker]' -c constraints.txt
	@touch $@

.venv/.dev: .venv/.created pyproject.toml constraints.txt
	$(BIN)/pip install --no-compile -e '.[worker,ucx,nixl,kubernetes,bench,otel,test,lint]' -c constraints.txt
	-$(BIN)/python -m compileall -q -j 0 -x '/tests/|/transformers/models/' .venv/lib > .venv/compiled  # pip would on one core; what is for another Python fails
	@touch $@ .venv/.worker

# Whoever serves or tests has no use for it.
.venv/.docs: .venv/.created pyproject.toml constraints.txt
	$(BIN)/pip install --no-compile -e '.[docs]' -c constraints.txt
	@touch $@
