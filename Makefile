# Every target makes the environment that it needs, once, and again only when pyproject.toml changes.

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
SGLANG_VERSION ?= 0.5.23
TESTS ?= not gpu
# a worker a core for tests that start no server
SPREAD := -n auto --maxprocesses 4
# two files at a time for those that start servers, each of which computes on one core; in order, since the second one is the longest
SERVERS := -n 2 --dist loadfile --no-loadscope-reorder
# the kernels under Triton's interpreter, in a run of their own
KERNELS ?= TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest -q $(SPREAD)
# lines of the package that tests without a server run, shown after them
COVERAGE ?= --cov --cov-report=term:skip-covered
# pip's bars for a person; nothing but errors in a log
QUIET := $(shell test -t 2 || echo -qq)

.DEFAULT_GOAL := help
.PHONY: help demo test compat lint docs bench release-check hooks clean distclean gpu

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo-$(SGLANG_VERSION) ## serve a real model with locks, chat over a long document, compare with dense
	$(VENV)/bin/locks-sglang demo

test: $(VENV)/.test-$(SGLANG_VERSION) ## run the tests; one kind: make test TESTS='not gpu and not server'
	$(KERNELS)
	@# pytest ends with 5 where it has nothing to run, which only one of the two may
	export HF_HUB_OFFLINE=1; \
	$(VENV)/bin/python -m pytest -q $(SPREAD) --dist loadfile $(COVERAGE) -m '($(TESTS)) and not server'; light=$$?; \
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q $(SERVERS) -m '($(TESTS)) and server'; heavy=$$?; \
	[[ "$$light $$heavy" =~ ^(0 0|0 5|5 0)$$ ]]

compat: ## run the tests on the oldest supported SGLang, 0.5.17
	$(MAKE) test VENV=.venv-0517 SGLANG_VERSION=0.5.17 TESTS='($(TESTS)) and not one_version' KERNELS= COVERAGE=

lint: .venv-lint/.installed ## check style and types
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/mypy

docs: .venv-docs/.installed ## build the documentation strictly into build/site
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@# what a reader's browser would fetch from elsewhere
	@! grep -rEn '<(script|link|img)[^>]* (src|href)="?https?:' build/site --include='*.html'

bench: gpu $(VENV)/.demo-$(SGLANG_VERSION) ## time every kernel on this machine's GPU, into build/kernels.jsonl
	$(VENV)/bin/locks-sglang bench all --out build/kernels.jsonl

gpu:
	@nvidia-smi --list-gpus > /dev/null 2>&1 || { echo 'make bench needs an NVIDIA GPU: nvidia-smi finds none' >&2; exit 2; }

release-check: $(VENV)/.test-$(SGLANG_VERSION) ## build wheel and sdist, install them into bare environments, look at what they hold
	$(VENV)/bin/python -m pytest -q tests/test_packaging.py

hooks: .venv-lint/.installed ## run `make lint` before every commit
	.venv-lint/bin/pre-commit install

clean: ## remove what was built: results, the demo's model, caches
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean ## remove the environments too (10 GB each)
	rm -rf .venv .venv-0517 .venv-lint .venv-docs

# Debian's Python comes without ensurepip; its pip can then fill the environment from outside.
define environment
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=...") if sys.version_info < (3, 11) else 0'
	@$(PYTHON) -m venv $(1) > /dev/null 2>&1 || { $(PYTHON) -m venv --without-pip $(1) \
	  && $(PYTHON) -m pip --python $(1)/bin/python install $(QUIET) pip; }
endef

$(VENV)/.demo-$(SGLANG_VERSION): pyproject.toml
	@echo "installing SGLang $(SGLANG_VERSION) into $(VENV): about 10 GB, some minutes"
	$(call environment,$(VENV))
	@rm -f $(VENV)/.demo-* $(VENV)/.test-*
	$(VENV)/bin/python -m pip install $(QUIET) 'sglang==$(SGLANG_VERSION)' -e '.[demo]'
	@touch $@

$(VENV)/.test-$(SGLANG_VERSION): $(VENV)/.demo-$(SGLANG_VERSION)
	$(VENV)/bin/python -m pip install $(QUIET) 'sglang==$(SGLANG_VERSION)' -e '.[demo,test]'
	@touch $@

# The linters, or what builds the documentation: one extra alone, as pyproject.toml pins it, without SGLang.
.venv-lint/.installed .venv-docs/.installed: .venv-%/.installed: pyproject.toml
	$(call environment,.venv-$*)
	@.venv-$*/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["optional-dependencies"]["$*"], sep="\n")' > .venv-$*/requirements.txt
	.venv-$*/bin/python -m pip install $(QUIET) -r .venv-$*/requirements.txt
	@touch $@
