# `make demo` and `make test` also work on a fresh machine. They require Python 3.10 or later with venv, a C++ compiler
# and make. Horovod is built with MPI if mpicc is found.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
HOROVOD := $(VENV)/.horovod
TRAINERS := $(VENV)/.trainers

# Test processes: more than the two cores of CI, because many tests wait. Files are not split, because their tests share
# ranks.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# If it is set, as in some containers, every process compiles all modules again, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

# The command that installs packages; CI sets another one. Python compiles each module when it is first imported. Most of
# the 22,000 installed modules are never imported.
INSTALL ?= $(BIN)/python -m pip install --quiet --no-compile

CASES ?= 1000
SEQUENCES ?= 200
TRIALS ?= 100
FIRST ?= 0

DOCS := docs/_build/html

# make test-torch uses a separate virtual environment for each version of torch.
TORCH_VENV := .venv-$(TORCH)

.PHONY: demo test test-ci test-all test-torch test-torch-suites check lint types docs docs-serve bench fuzz chaos soak gpu-check setup horovod clean

demo: $(INSTALLED)
	$(BIN)/unitrain launch -np 2 examples/digits.py --device cpu

# MARKERS="not nightly" also runs the tests of `make test-ci`, and REPEAT=5 repeats up to five failed tests once. CI
# uses both.
test: $(INSTALLED) $(HOROVOD)
	$(PYTEST) $(if $(MARKERS),-m "$(MARKERS)") $(if $(REPEAT),|| $(BIN)/python -m tests.support.repeat_failed $$? $(REPEAT))

# Tests that take long, which CI runs in addition.
test-ci: $(INSTALLED) $(HOROVOD)
	$(PYTEST) -m "ci and not nightly"

# The nightly tier: every test, then CASES random runs, SEQUENCES random sequences of calls, and TRIALS jobs that are disturbed by random faults.
test-all: $(INSTALLED) $(HOROVOD) $(TRAINERS)
	$(PYTEST) -m "nightly or not nightly"
	$(BIN)/python -m tests.fuzzer --cases $(CASES) --sequences $(SEQUENCES) --first $(FIRST)
	$(BIN)/python -m tests.chaos --trials $(TRIALS) --first $(FIRST)

# The contract suite and an example with other versions of torch and Python, with the newest packages that allow them.
test-torch:
	@test -n "$(TORCH)" || { echo "Usage: make test-torch TORCH=2.6.0 [PYTHON=python3.10]"; exit 2; }
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet torch==$(TORCH) setuptools wheel
	echo torch==$(TORCH) >$(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --no-build-isolation --constraint $(TORCH_VENV)/constraints.txt \
		--editable ".[test]"
	$(TORCH_VENV)/bin/unitrain horovod build
	$(TORCH_VENV)/bin/unitrain launch --backend ddp -np 2 examples/digits.py --device cpu
	$(TORCH_VENV)/bin/unitrain launch --backend horovod -np 2 examples/digits.py --device cpu
	$(TORCH_VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile unitrain/testing

# PyTorch's tests of its process groups with Gloo and with Horovod, over Gloo and MPI, and Horovod's own tests. The torch
# wheel has some of them; PYTORCH and HOROVOD_SOURCE are checkouts with the others.
test-torch-suites: $(INSTALLED) $(HOROVOD)
	$(BIN)/python -m tests.torch_suites --write benchmarks/results/torch_suites.md \
		$(if $(PYTORCH),--folder $(PYTORCH)) $(if $(HOROVOD_SOURCE),--horovod-folder $(HOROVOD_SOURCE))

# With --jobs 2, mypy runs beside the other checks.
check: docs lint types

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.support.structure

types: $(INSTALLED)
	$(BIN)/mypy

# Warnings, such as broken links, are errors. Sphinx downloads nothing.
docs: $(INSTALLED)
	$(BIN)/sphinx-build --builder html --fail-on-warning --keep-going --quiet docs $(DOCS)

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(DOCS) 8000

bench: $(INSTALLED) $(HOROVOD)
	$(BIN)/python benchmarks/step_overhead.py

# Random runs, and random sequences of calls in one process, compared with plain torch; FIRST is the first seed.
fuzz: $(INSTALLED) $(HOROVOD)
	$(BIN)/python -m tests.fuzzer --cases $(CASES) --sequences $(SEQUENCES) --first $(FIRST)

# Jobs that are disturbed by random, overlapping faults; FIRST is the first seed. Some need root permissions.
chaos: $(INSTALLED) $(HOROVOD)
	$(BIN)/python -m tests.chaos --trials $(TRIALS) --first $(FIRST)

# 20,000 steps of every mode, without additional memory, descriptors, threads, store keys or time per step.
soak: $(INSTALLED) $(HOROVOD)
	$(PYTEST) tests/faults/test_soak.py -m nightly

# On a machine with a GPU; everything else runs without one.
gpu-check: $(INSTALLED) $(HOROVOD)
	$(BIN)/python benchmarks/gpu_check.py

setup: $(INSTALLED)

horovod: $(HOROVOD)

$(INSTALLED): setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch, unitrain and the development tools in $(VENV). This takes minutes and about 7 GB."
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(INSTALL) --constraint constraints.txt --editable ".[dev]"
	touch $@

# The wheel is built once for this torch and compiler and kept outside the checkout: minutes the first time, seconds later.
$(HOROVOD): $(INSTALLED) $(wildcard unitrain/horovod_wheel/patches/*.patch)
	$(BIN)/unitrain horovod build
	touch $@

# Lightning, Accelerate and ignite, which nightly tests run on Horovod's process group.
$(TRAINERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,peers]"
	touch $@

clean:
	rm -rf $(VENV) .venv-* docs/_build runs .mypy_cache .pytest_cache .ruff_cache
