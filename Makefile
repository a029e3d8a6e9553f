# Both targets do all their own set-up: a virtual environment with the exact versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: demo test

demo: $(INSTALLED)
	@$(VENV)/bin/moectl demo

# One thread per test process: two processes already fill two cores, and waiting threads would only spin.
test: $(INSTALLED)
	@$(VENV)/bin/ruff check --quiet .
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,report]'
	@touch $@
