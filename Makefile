# Every target does its own set-up: a machine needs Python 3.11+, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: venv demo test check format clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	touch $@

demo: venv
	$(BIN)/lrm demo

test: venv
	$(BIN)/pytest -n 2
	TRITON_INTERPRET=1 $(BIN)/pytest tests/test_triton_kernels.py tests/test_ssd_kernels.py \
		tests/test_convolution.py tests/test_rotation.py -n 2

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/pytest tests/test_readme.py

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build demo
