# make install | demo | test | lint | clean        (make demo VENV=/path/to/env PYTHON=python3.12)
#
# `make test` works in two processes, which a machine of two cores is enough for; PROCESSES=0 is one process.
# Both get the files in alphabetical order (not the file of most tests first: those are not the longest).
# Benchmarks come first and alone: their bounds are on ratios of times, which move when caches are shared.
VENV ?= .venv
PYTHON ?= python3
PROCESSES ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo 'error: $(PYTHON) is not Python 3.11 or later; name one, as in: make install PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $@

demo: install
	$(BIN)/pina run --output runs/demo --overwrite

test: install
	$(BIN)/python -m pytest tests/benchmarks
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --ignore=tests/benchmarks \
		--cov=pina_flwr --cov-report=term

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Results (runs/) stay. The environment goes only if `make install` made it.
clean:
	if [ -f $(STAMP) ]; then rm -rf $(VENV); fi
	rm -rf build dist *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
