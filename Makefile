# All targets do all their own set-up: a virtual environment with the exact versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
TESTED := $(VENV)/.installed-for-tests
PIP_INSTALL := $(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

# Only what is imported gets compiled, once; where a container sets this, every process would do so anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow

demo: $(INSTALLED)
	@$(VENV)/bin/moectl demo

test: $(TESTED)
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/python -m pytest -q -n 2 --dist worksteal -m 'not slow'

test-slow: $(TESTED)
	@$(VENV)/bin/python -m pytest -q -n 2 --dist worksteal -m slow

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) --no-compile -e .
	@touch $@

$(TESTED): $(INSTALLED)
	$(PIP_INSTALL) --no-compile -e '.[test]'
	@touch $@
