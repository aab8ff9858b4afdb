# Every target sets up what it needs: `make demo` or `make test` on a fresh clone is all there is to type.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install test quick demo doctor bench docs conformance clean

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

# A minute on two cores, once the loops are compiled: every module, and a few cases of each law.
quick: install
	$(BIN)/pytest -m "not slow"

demo: install
	$(BIN)/qattn demo

doctor: install
	$(BIN)/qattn doctor

# Quick sizes; `make bench FULL=1` takes those of docs/speed.md, and hours.
bench: install
	$(BIN)/python benchmarks/all.py $(if $(FULL),--full)

docs: $(VENV)/documented
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/documented: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# The real flash-attn package, its kernel interpreted on a CPU, in an environment of its own.
conformance:
	bash conformance/run.sh

clean:
	rm -rf $(VENV) .venv-conformance .pytest_cache .mypy_cache .ruff_cache site
