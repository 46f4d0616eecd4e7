# Every target does its own set-up: a machine needs Python 3.11+, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

INTEGRATIONS := $(VENV)/.integrations

.PHONY: venv integrations demo experiments docs test test-all check dist matrix format clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	touch $@

integrations: $(INTEGRATIONS)

# torchtitan pins an older datasets than trl needs, and uses none of it in our tests.
$(INTEGRATIONS): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[integrations]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
		torchtitan spmd_types torch_checkpointing torchdata einops
	touch $@

demo: venv
	$(BIN)/lrm demo

# The paper's experiments at the size of a CPU; a stopped one goes on where it was.
experiments: venv
	$(BIN)/lrm experiment all --preset cpu
	$(BIN)/lrm experiment report --preset cpu

# The site; a warning is an error.
docs: venv
	$(BIN)/sphinx-build -q -E -W --keep-going docs build/docs
	@echo "Open build/docs/index.html"

# Tests of Triton kernels run on the CPU, in the interpreter, in a process of their own.
KERNEL_TESTS := $(addprefix tests/test_,triton_kernels.py newton_schulz_kernels.py ssd_kernels.py \
	convolution.py rotation.py gate.py head_loss.py)

# One more than the two cores of CI: tests of several ranks wait for each other.
WORKERS ?= 3
# `make check` runs the code of the documents.
NOT_DOCS := --ignore tests/test_readme.py

# Every law once.
test: venv
	$(BIN)/pytest -n $(WORKERS) --quick $(NOT_DOCS)
	TRITON_INTERPRET=1 $(BIN)/pytest $(KERNEL_TESTS) -n $(WORKERS) --quick

# The whole grid of cases, and the long runs.
test-all: venv integrations
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(NOT_DOCS)
	TRITON_INTERPRET=1 $(BIN)/pytest $(KERNEL_TESTS) -n $(WORKERS)

check: venv integrations
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(MAKE) docs
	$(BIN)/pytest tests/test_readme.py -n $(WORKERS)

# sdist and wheel, and the wheel in an environment that has nothing but what it asks for.
INSTALLED := build/installed
dist: venv
	rm -rf dist $(INSTALLED)
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(INSTALLED)
	$(INSTALLED)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	$(INSTALLED)/bin/python -I tests/installed.py

# The tests of the library with another torch or Python: make matrix TORCH=2.9.1 PYTHON=python3.13
# By hand: torch with CUDA is gigabytes.
TORCH ?= 2.9.1
MATRIX := build/torch-$(TORCH)
LIBRARY_TESTS := $(patsubst %,tests/test_%.py,adamw contract diagnosis equilibrium gauge groups \
	initialize loading multiplier muon newton_schulz packed_multipliers parallel plain_diagnosis plan \
	public_api reparametrize replicas simulation symmetry weight_norm wrapper)
matrix:
	$(PYTHON) -m venv $(MATRIX)
	grep -v -e '^torch==' -e '^triton==' constraints.txt > $(MATRIX)/constraints.txt
	$(MATRIX)/bin/pip install --quiet --disable-pip-version-check -c $(MATRIX)/constraints.txt \
		torch==$(TORCH) -e '.[transformers]' pytest pytest-xdist hypothesis lion-pytorch prodigyopt
	$(MATRIX)/bin/pytest -n $(WORKERS) $(LIBRARY_TESTS)

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo experiments
