# Every target sets up what it needs: `make demo` or `make test` on a fresh clone is all there is to type.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install test quick demo doctor bench docs conformance gpu gpu-model matrix dist clean

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

# The site, with its notebooks executed, and a look at each of its pages in a browser, if there is one.
docs: $(VENV)/documented
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	SITE=site $(BIN)/pytest -n 0 tests/test_site.py

$(VENV)/documented: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# The GPU paths on a CPU: interpreted, compiled for GPUs that are not there, or emulated; in environments of its own.
# RECORD=1 keeps the table.
conformance:
	$(if $(RECORD),RECORD=1) bash conformance/run.sh

# How fast attention kernels would be, ours and others', by a model of their machine code; after `make conformance`.
gpu-model:
	PYTHONPATH=conformance:tests .venv-conformance-triton/bin/python benchmarks/gpu_model.py $(if $(RECORD),--record)

# On a machine with a GPU: tests, errors, speed, a million points and a training step, in one report.
gpu: install
	$(BIN)/python benchmarks/gpu.py

# The oldest versions that are declared, some between, the newest: half an hour, 6 GB at a time, and 10 GB of wheels kept.
matrix: install
	$(BIN)/python tests/matrix.py

# Wheel and sdist, built twice and compared, looked at, installed without extras, and used as README says.
dist: $(VENV)/distributing
	$(BIN)/python tests/distribution.py

$(VENV)/distributing: $(VENV)/installed
	$(BIN)/python -m pip install --quiet build hatchling twine
	touch $@

clean:
	rm -rf $(VENV) .venv-conformance* .matrix dist .pytest_cache .mypy_cache .ruff_cache site
