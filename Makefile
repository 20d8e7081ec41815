# `make demo` and `make test` set everything up by themselves, in .venv.
PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0

.PHONY: demo test docs slow test-gpu lint format clean

demo: .venv/ready
	$(BIN)/torchrls demo

test: .venv/ready lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --cov --cov-report=term --cov-fail-under=95

docs: .venv/ready
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html

slow: .venv/ready
	$(BIN)/pytest -q -m slow

test-gpu:
	$(PYTHON) -m pytest -q -m gpu tests/test_device.py

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# torch comes first and pinned: an open range would pull in a newer build with gigabytes of CUDA.
.venv/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) "setuptools>=77"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv docs/_build .mypy_cache .pytest_cache .ruff_cache .coverage
