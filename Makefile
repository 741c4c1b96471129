# make demo    train, evaluate and report the small study on the embedded corpus: reports/demo/index.html
# make test    the test suite (make test-slow adds the tests that take minutes)
# make check   lint, formatting, types
# make format  apply the formatter and the safe lint fixes
#
# Each target sets up .venv by itself. Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin
PYTEST := python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
INSTALL := $(RUN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow check format
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	@$(RUN)/pe-study run recipes/demo.yaml --jobs auto

test: $(VENV)/.installed-test
	@$(RUN)/$(PYTEST)

test-slow: $(VENV)/.installed-test
	@$(RUN)/$(PYTEST) -m "slow or not slow"

check: $(VENV)/.installed-test
	@$(RUN)/ruff check .
	@$(RUN)/ruff format --check .
	@$(RUN)/mypy

format: $(VENV)/.installed-test
	@$(RUN)/ruff check --fix-only .
	@$(RUN)/ruff format .

$(RUN)/python:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(RUN)/python
	@echo "Installing pe_study into $(VENV) (once, a few minutes)" >&2
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(RUN)/python
	@echo "Installing pe_study and its test tools into $(VENV) (once, a few minutes)" >&2
	@$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.installed
