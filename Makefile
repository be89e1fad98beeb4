# One command each; everything sets itself up on a machine that has only Python >= 3.11 and make.
#
#   make demo    set up, then train a small model on a practice crew
#   make test    the tests that touch every promise, about ten minutes on two cores
#   make test-all    every test that this machine can run, half an hour there
#   make check   format, lint, types, layers, budgets, messages, pages
#   make bench   list the benchmarks; `make bench NAME=x ARGS="..."` runs bench/x.py
#   make soak    the long tests
#   make docs    the pages as a site, in build/site
#   make setup   .venv only (again when pyproject.toml, constraints.txt or tools/pick_torch.py changed)
#   make wheel   one file to install cuadrilla from on another machine
#   make clean   remove .venv and caches
#
# PYTHON=/path/to/python chooses the interpreter of .venv; TORCH="..." replaces the arguments of pip that choose torch.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.SUFFIXES:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DEV := $(VENV)/.ready-to-test
SPANISH := src/cuadrilla/locale/es/LC_MESSAGES/cuadrilla
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
EXTRAS := data,export
DEV_EXTRAS := dev,tensorboard,hf,export,serve
PYTHON ?=
TORCH ?=
NAME ?=
ARGS ?=

CANDIDATES := python3.14 python3.13 python3.12 python3.11 python3 python
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))

DIST := dist

.PHONY: help setup wheel demo test test-all check format-check lint types layers budgets messages docs bench soak clean

help:
	@sed -n '/^#   make/s/^# //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/pick_torch.py
	@rm -f $(STAMP) $(DEV)
	@set -e; \
	if ! $(BIN)/python -c '$(FITS)' >/dev/null 2>&1 || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  python=; \
	  for candidate in $(or $(PYTHON),$(CANDIDATES)); do \
	    if "$$candidate" -c '$(FITS)' >/dev/null 2>&1; then python=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "error: no Python 3.11 to 3.14 found (tried: $(or $(PYTHON),$(CANDIDATES)))" >&2; \
	    echo "hint: install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python@3.13), or name it: make setup PYTHON=/path/to/python3" >&2; \
	    exit 3; \
	  fi; \
	  if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	    echo "error: $$python cannot make virtual environments" >&2; \
	    echo "hint: apt install python3-venv (or python3.NN-venv for $$python)" >&2; \
	    exit 3; \
	  fi; \
	  echo "setup 1/3: making $(VENV) with $$($$python --version)" >&2; \
	  "$$python" -m venv --clear $(VENV); \
	else \
	  echo "setup 1/3: $(VENV) is there, $$($(BIN)/python --version)" >&2; \
	fi
	@set -e; \
	arguments='$(TORCH)'; \
	if [ -z "$$arguments" ]; then \
	  echo "setup 2/3: choosing torch" >&2; \
	  arguments=$$($(BIN)/python tools/pick_torch.py); \
	fi; \
	echo "setup 2/3: installing $$arguments (200 MB for the CPU, up to 3 GB with CUDA)" >&2; \
	$(PIP) install $$arguments >&2
	@echo "setup 3/3: installing cuadrilla and its libraries" >&2
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]' >&2
	@touch $(STAMP)
	@echo "setup: done; to use the command in this shell: . $(BIN)/activate" >&2

# What only tests and checks need: as much again.
$(DEV): $(STAMP)
	@echo "setup: installing what tests and checks need" >&2
	@$(PIP) install -c constraints.txt -e '.[$(DEV_EXTRAS)]' >&2
	@touch $(DEV)

# Compiled by the installation, too (hatch_build.py); here again after a change.
$(SPANISH).mo: $(SPANISH).po $(DEV)
	@$(BIN)/pybabel -q compile --domain cuadrilla --directory src/cuadrilla/locale 2>/dev/null

wheel: $(STAMP)
	@rm -f $(DIST)/*.whl
	@$(PIP) wheel -qq --no-deps --wheel-dir $(DIST) .
	@$(BIN)/python -c 'import hashlib, pathlib; [print(path, "SHA-256", hashlib.sha256(path.read_bytes()).hexdigest()) for path in pathlib.Path("$(DIST)").glob("*.whl")]'

demo: $(STAMP)
	@$(BIN)/cuadrilla demo

# Tests run side by side, one more than cores, since they wait for a part of their time; the slowest are shown at the end.
PYTEST := $(BIN)/pytest -q -ra --durations=30 -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses=8 \
  --no-loadscope-reorder --max-worker-restart 0

test: $(DEV) $(SPANISH).mo
	$(PYTEST) -m "not soak and not thorough"

test-all: $(DEV) $(SPANISH).mo
	$(PYTEST) -m "not soak"

soak: $(DEV) $(SPANISH).mo
	$(BIN)/pytest -q -ra --durations=10 -m "unit and not soak" --hypothesis-profile=explore --timeout=3600
	$(BIN)/pytest -q -ra --durations=10 -m soak --timeout=3600

# Every part runs, also after one that failed: one look shows all there is to repair.
check: $(DEV)
	@$(MAKE) --no-print-directory -k format-check lint types layers budgets messages docs

format-check: $(DEV)
	$(BIN)/ruff format --check .

lint: $(DEV)
	$(BIN)/ruff check .

types: $(DEV)
	$(BIN)/mypy

layers: $(DEV)
	$(BIN)/lint-imports

budgets: $(DEV)
	$(BIN)/python tools/budgets.py

messages: $(DEV) $(SPANISH).mo
	$(BIN)/python tools/messages.py

# Not with --quiet: it drops the warnings that --strict counts.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A benchmark's docstring says how it is started; words in capitals are arguments that it needs.
bench: $(DEV)
	@set -e; \
	for name in $$(sed -n 's/^ *python -m bench\.\([a-z_]*\) .*/\1/p' bench/*.py | uniq); do \
	  file=bench/$$name.py; \
	  needs=$$(sed -n "s/^ *python -m bench\.$$name \([A-Z_][A-Z_]*\).*/\1/p" "$$file" | uniq); \
	  if [ -z "$(NAME)" ]; then \
	    printf '%-28s %s\n' "make bench NAME=$$name" "$$(sed -n '1s/^"""//p' "$$file" | sed 's/"""$$//')"; \
	  elif [ "$(NAME)" = all ] && [ -n "$$needs" ]; then \
	    echo "bench: $$file is left out; it is started by: make bench NAME=$$name ARGS=$$needs" >&2; \
	  elif [ "$(NAME)" = all ] || [ "$(NAME)" = "$$name" ]; then \
	    found=yes; echo "bench: $$file" >&2; $(BIN)/python -m "bench.$$name" $(ARGS); \
	  fi; \
	done; \
	if [ -n "$(NAME)" ] && [ -z "$$found" ]; then echo "error: there is no benchmark $(NAME)" >&2; exit 2; fi

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} +
