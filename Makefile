# Two commands do everything on a fresh machine with Python 3.11 or newer: make quickstart, make test.
PYTHON ?= python3
VENV := .venv
# Compiled all at once, on all cores, when everything is there.
PIP := $(VENV)/bin/python -m pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt
COMPILE := $(VENV)/bin/python -m compileall -q -j 0 $(VENV)/lib tutti >/dev/null 2>&1 || true
WORKERS ?= 4# on two cores: many tests wait for others
TORCH := $(shell grep '^torch==' constraints.txt)
TRITON := $(shell grep '^triton==' constraints.txt)# that of this torch, which builds for CUDA require
LEGACY_KERAS := $(shell grep '^tf_keras==' constraints.txt)# asks for tensorflow, which tensorflow-cpu is by another name
unexport PYTHONDONTWRITEBYTECODE  # tests and what they start are compiled once
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1

PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup $(if $(SHUFFLE),--shuffle $(SHUFFLE))

.PHONY: help quickstart test test-logic test-ranks test-system test-slow check strength docs system lock clean

help:
	@echo "make quickstart   set up .venv and train on two ranks, with a plot, in about a minute"
	@echo "make test         set up and run the tests: the three tiers that follow; SHUFFLE=7 runs them in a random order"
	@echo "make test-logic   tests that start no process"
	@echo "make test-ranks   tests with real ranks"
	@echo "make test-system  tests with commands, Slurm, MPI, ssh, a browser, and the commands of the docs"
	@echo "make test-slow    the others: long forms of the same, and runs on real data where it is"
	@echo "make check        format, lint, types, import layers and the tests that start no process"
	@echo "make strength     38 deliberate faults, each put in alone: which test catches it"
	@echo "make docs         set up and write the documentation site: build/site/index.html"
	@echo "make lock         write constraints.txt anew from the newest packages"

quickstart: $(VENV)/installed
	$(VENV)/bin/tutti train digits -n 2
	@echo 'To have tutti on the PATH of this shell: source $(VENV)/bin/activate'

test: $(VENV)/installed-dev system
	$(PYTEST) -m "not slow"

test-logic test-ranks test-system: test-%: $(VENV)/installed-dev system
	$(PYTEST) -m "$* and not slow"

test-slow: $(VENV)/installed-dev system
	$(PYTEST) -m slow

strength: $(VENV)/installed-dev system
	$(VENV)/bin/python tests/strength.py

# The pages keep their places, so that the links between them hold.
docs: $(VENV)/installed-docs
	@mkdir -p build/pages
	@for each in README.md CONTRIBUTING.md CHANGELOG.md docs examples benchmarks; do ln -sfn ../../$$each build/pages/$$each; done
	PATH="$(abspath $(VENV))/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet
	@echo "documentation: build/site/index.html; with search: python -m http.server -d build/site"

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports
	$(PYTEST) -m "logic and not slow" -q

# torch alone first: asked for together with the rest, pip may choose another build of it.
$(VENV)/torch: constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tutti needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) and what it needs into $(VENV) (a few minutes the first time)"
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml compat/horovod/pyproject.toml
	$(PIP) --editable '.[digits]'
	$(PIP) --no-deps --editable compat/horovod
	@$(VENV)/bin/tutti schema --out recipes/recipe.schema.json >/dev/null
	@$(COMPILE)
	@touch $@

$(VENV)/installed-dev: $(VENV)/torch pyproject.toml compat/horovod/pyproject.toml
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps $(LEGACY_KERAS)
	$(PIP) --no-deps --editable compat/horovod
	@$(VENV)/bin/tutti schema --out recipes/recipe.schema.json >/dev/null
	@$(COMPILE)
	@touch $@ $(VENV)/installed

$(VENV)/installed-docs: $(VENV)/torch pyproject.toml
	$(PIP) --editable '.[docs]'
	@touch $@

# Launchers that the tests use for real; without them, or without the right to install them, those tests are skipped.
system:
	@tests/install_launchers.sh

lock:
	rm -rf $(VENV)/lock && $(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install --quiet $(TORCH) $(TRITON)
	$(VENV)/lock/bin/python -m pip install --quiet '.[dev,bench,docs]'
	$(VENV)/lock/bin/python -m pip install --quiet --no-deps tf_keras
	$(VENV)/lock/bin/python -m pip freeze --exclude tutti-train | sed 's/+cpu$$//' > constraints.txt
	rm -rf $(VENV)/lock

clean:
	rm -rf $(VENV) build dist *.egg-info
