# Each target sets up .venv by itself: a machine needs Python 3.11 or 3.12 and make, nothing else.
# `make serve` installs what serving needs; the checking targets add the development tools.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
BENCH ?= decode

BIN := .venv/bin
RUNTIME := .venv/.stamp-runtime
DEV := .venv/.stamp-dev
SERVICES := .venv/.stamp-services
SETUP_INPUTS := pyproject.toml constraints/cpu.txt tools/setup_venv.py

# One thread for each of the two test workers; torch would otherwise start one per core in both.
TEST_ENV := OMP_NUM_THREADS=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help serve setup setup-dev test test-long check fix bench evidence

help:
	@echo "make serve | test | test-long | check | fix | bench | evidence   (variables: PYTHON HOST PORT ARGS BENCH)"

$(RUNTIME): $(SETUP_INPUTS)
	@command -v $(PYTHON) >/dev/null || { echo "set-up: '$(PYTHON)' was not found; install Python 3.11 or 3.12, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) tools/setup_venv.py runtime
	@touch $@

$(DEV): $(RUNTIME)
	@$(BIN)/python tools/setup_venv.py dev
	@touch $@

# PostgreSQL and Chromium for tests; where they cannot be installed, those tests are skipped.
$(SERVICES): $(RUNTIME) tools/setup_services.py
	@$(BIN)/python tools/setup_services.py
	@touch $@

setup: $(RUNTIME)
setup-dev: $(DEV)

serve: $(RUNTIME)
	$(BIN)/loraplex serve --demo --adapter-dir demo/adapters --host $(HOST) --port $(PORT) $(ARGS)

test: $(DEV) $(SERVICES)
	$(PYTEST) -m "not gpu and not long" $(ARGS)

# pytest's exit status 5 means that nothing was collected: there is always a long test, so that is a fault.
test-long: $(DEV) $(SERVICES)
	@rc=0; $(PYTEST) -m "long and not gpu" $(ARGS) || rc=$$?; \
	if [ $$rc -eq 5 ]; then echo "test-long: no test was collected; a long test must exist (or ARGS selects none)" >&2; fi; \
	exit $$rc

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/gen_docs.py --check

fix: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tools/gen_docs.py

bench: $(RUNTIME)
	@set -e; for name in $(BENCH); do $(BIN)/loraplex bench $$name $(ARGS); done

evidence: $(RUNTIME)
	$(BIN)/python tools/evidence.py
