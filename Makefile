# `make demo` and `make test` need nothing but Python 3.10 or later and this folder: they set up .venv themselves.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests wait for each other's processes much of the time: more of them than there are cores, the next to whoever is free.
SIDE_BY_SIDE := -n 4 --dist loadgroup

.PHONY: demo test lint docs bench clean

demo: $(READY)
	$(BIN)/prsgd compare --out runs/demo --overwrite

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python tools/docs.py

bench: $(READY)
	$(BIN)/python bench/core.py

# torch is named here so that pip settles on one version at once; pyproject.toml says what the package itself needs.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0 -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site .cache
	find src tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} +
