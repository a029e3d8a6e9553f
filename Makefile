# Both targets do all their own set-up: a virtual environment with the exact versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

# Only what is imported gets compiled, once; where a container sets this, every process would do so anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test

demo: $(INSTALLED)
	@$(VENV)/bin/moectl demo

test: $(INSTALLED)
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/python -m pytest -q -n 2 --dist worksteal

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test]'
	@touch $@
