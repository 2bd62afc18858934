# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv in this folder.

PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0

.PHONY: demo test check test-gpu bench bench-gpu clean

demo: .venv/ready
	$(BIN)/shoal generate "The capital of France is" --max-tokens 48 --temperature 0

test: .venv/ready-test
	$(BIN)/python -m pytest tests

check: .venv/ready-test
	$(BIN)/ruff check shoal tests benchmarks examples
	$(BIN)/mypy

# On a machine with a GPU, with the torch that is installed there.
test-gpu:
	$(PYTHON) -m pytest tests/gpu

bench: .venv/ready-test
	$(BIN)/python benchmarks/cpu.py

# On a machine with a GPU, with the torch that is installed there, and matplotlib: the whole table, drawn into docs/performance.md.
bench-gpu:
	$(PYTHON) benchmarks/gpu.py --workloads nano,single,prefill,decode,shared,four,service,tiny,long,tree --json benchmarks/results/h200.json
	$(PYTHON) benchmarks/performance.py benchmarks/results/h200.json

# torch first, pinned: on a machine without a GPU the pin finds a CPU build where there is one.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/ready-test: .venv/ready
	$(BIN)/python -m pip install --quiet --editable ".[test,check]"
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
