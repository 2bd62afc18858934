# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv in this folder, by whichever comes first.

PYTHON ?= python3
BIN := .venv/bin

# The torch of .venv, and the index that it comes from. On a machine without a GPU that is PyTorch's own index of CPU wheels (200 MB), if
# it answers within three seconds; the ordinary index has only builds with CUDA for Linux on x86 (gigabytes). It is chosen once, when .venv
# is made. Variables say otherwise:
#     make demo TORCH_INDEX=                                              pip's ordinary index
#     make demo TORCH_INDEX=https://download.pytorch.org/whl/cu130        another one
#     make demo TORCH=torch==2.12.0                                       another version
TORCH ?= torch==2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
HAS_GPU := test -e /dev/nvidia0 || command -v nvidia-smi >/dev/null
# The alarm ends Python, as a timeout of urlopen would not bound the search for the address.
ANSWERS := $(PYTHON) -c "import signal, urllib.request; signal.alarm(3); urllib.request.urlopen('$(CPU_INDEX)/torch/')"
TORCH_INDEX ?= $(shell { $(HAS_GPU) || ! $(ANSWERS) || echo $(CPU_INDEX); } 2>/dev/null)

# The tests run in that many processes, those of a file in one of them, in the order of tests/conftest.py: more than the two cores that
# CI has, as many wait for processes of their own or for time to pass. Each takes about a GB. A GPU has room for one.
JOBS ?= $(shell { $(HAS_GPU); } 2>/dev/null && echo 1 || echo 4)
PYTEST = $(BIN)/python -m pytest tests -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-slow test-rare test-clients check format docs vendor test-gpu bench bench-gpu clean

demo: .venv/ready
	echo "What is photosynthesis? Answer in two sentences." | $(BIN)/shoal chat --temperature 0
	@echo "Now talk to it yourself: $(BIN)/shoal chat"

test: .venv/ready-test
	$(PYTEST)

# What is slow or rare, in two parts: Shoal's own tests, and other people's clients. Clients run in an environment of their own,
# against a server of .venv.
test-slow: test-rare test-clients

test-rare: .venv/ready-test
	$(PYTEST) -m slow

test-clients: .venv/ready-test .venv-clients/ready
	SHOAL_PYTHON=$(CURDIR)/$(BIN)/python .venv-clients/bin/python -m pytest tests/clients -m slow -o asyncio_default_fixture_loop_scope=session

check: .venv/ready-test
	$(BIN)/ruff format --check shoal tests benchmarks examples deploy docs/site.py docs/images/draw.py
	$(BIN)/ruff check shoal tests benchmarks examples deploy docs/site.py docs/images/draw.py
	$(BIN)/mypy

format: .venv/ready-test
	$(BIN)/ruff format shoal tests benchmarks examples deploy docs/site.py docs/images/draw.py

# The pages as a site in build/site; a broken link fails. Once .venv-docs is there, it needs no network. To read it:
# python3 -m http.server -d build/site
docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

# The chat page's libraries, as npm has them, of the versions and checksums in the script. It needs npm.
vendor:
	.ci/vendor

# On a machine with a GPU, with the torch that is installed there.
test-gpu:
	$(PYTHON) -m pytest tests/gpu

bench: .venv/ready-test
	$(BIN)/python benchmarks/cpu.py

# On a machine with a GPU, with the torch that is installed there, and matplotlib: the whole table, drawn into docs/performance.md.
bench-gpu:
	$(PYTHON) benchmarks/gpu.py --workloads nano,single,prefill,decode,shared,four,service,tiny,long,tree --json benchmarks/results/h200.json
	$(PYTHON) benchmarks/performance.py benchmarks/results/h200.json

# torch comes first, from an index of its own, and shows its progress, as it is most of what is downloaded; the rest from pip's own index.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Shoal needs Python 3.11 or later: make PYTHON=python3.12, say" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	index="$(TORCH_INDEX)"; $(BIN)/python -m pip install $${index:+--index-url "$$index"} "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/ready-test: .venv/ready
	$(BIN)/python -m pip install --quiet --editable ".[test,check]"
	touch $@

# torch, which guidellm imports, comes as above. Without npm the tests of Vercel's AI SDK are skipped, which pytest reports.
.venv-clients/ready: tests/clients/requirements.txt tests/clients/package-lock.json
	$(PYTHON) -m venv .venv-clients
	index="$(TORCH_INDEX)"; .venv-clients/bin/python -m pip install --quiet $${index:+--index-url "$$index"} "$(TORCH)"
	.venv-clients/bin/python -m pip install --quiet --requirement $<
	if command -v npm >/dev/null; then npm --prefix tests/clients ci --no-audit --no-fund; else echo "npm was not found: Vercel's AI SDK is not tested"; fi
	touch $@

# The extra `docs` alone, without the rest of Shoal.
.venv-docs/ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

clean:
	rm -rf .venv .venv-clients .venv-docs tests/clients/node_modules build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis shoal/memory/_vmm*.so
	find . -name __pycache__ -prune -exec rm -rf {} +
