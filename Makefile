# Every target sets up what it needs: `make demo` or `make test` on a fresh clone is all there is to type.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install test demo doctor bench conformance clean

install: $(VENV)/installed

# torch first and pinned: an unpinned one may bring gigabytes of CUDA along.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

demo: install
	$(BIN)/qattn doctor
	$(BIN)/python examples/dirac.py --output demo.png

doctor: install
	$(BIN)/qattn doctor

bench: install
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/normalize.py
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/million.py
	$(BIN)/python benchmarks/modalities.py
	$(BIN)/python benchmarks/spectra.py
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/distributed.py

# The real flash-attn package, its kernel interpreted on a CPU, in an environment of its own.
conformance:
	bash conformance/run.sh

clean:
	rm -rf $(VENV) .venv-conformance .pytest_cache .mypy_cache .ruff_cache
