# `make demo` and `make test` set everything up by themselves, in .venv.
PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0

# Three tiers: `make check` after a change of the numerics, `make test` before a commit (it is what CI
# runs), `make slow` before a release.
.PHONY: demo check test docs house slow test-gpu compatibility lint format clean

demo: .venv/ready
	$(BIN)/torchrls demo

check: .venv/ready lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 -m "not slow and not long" tests/step tests/matrix tests/layers tests/selftest

test: .venv/ready lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --cov --cov-report=term --cov-fail-under=95

docs: .venv/ready
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html

# Draws the rooms and their imports into CONTRIBUTING.md.
house: .venv/ready
	$(BIN)/python docs/house.py

slow: .venv/ready
	$(BIN)/pytest -q -m slow

test-gpu:
	$(PYTHON) -m pytest -q -m gpu tests/whole/test_device.py

# make compatibility PYTHON=python3.10 TORCH=torch==2.6.0
compatibility:
	rm -rf .venv-compat
	$(PYTHON) -m venv .venv-compat
	$(call install,.venv-compat/bin/python)
	OMP_NUM_THREADS=1 .venv-compat/bin/pytest -q -p no:cacheprovider

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# torch comes first and pinned: an open range would pull in a newer build with gigabytes of CUDA.
define install
	$(1) -m pip install --quiet --disable-pip-version-check $(TORCH) "setuptools>=77"
	$(1) -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[dev]"
endef

.venv/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call install,$(BIN)/python)
	touch $@

clean:
	rm -rf .venv .venv-compat docs/_build .mypy_cache .pytest_cache .ruff_cache .coverage
