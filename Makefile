# Everything sets itself up: `make plans` and `make test` work in a fresh clone.
#
#   make plans                          compile every plan of every arch into packs/, print the coverage
#   make test                           the tests (no GPU needed; tests that need one skip and say which)
#   make lint                           format check, lint, types
#   make device-test fuzz sanitize bench     on a machine with a GPU of a catalogued arch
#
# torch is not needed by `make plans`. `make test TORCH=torch==2.13.0` installs that version instead of the newest.

PYTHON ?= python3
TORCH ?= torch>=2.9
VENV ?= .venv
PACKS ?= packs
ARCH ?= all
JOBS ?=
PIP_FLAGS ?= --quiet --disable-pip-version-check

BIN := $(VENV)/bin
SPECPLAN := $(BIN)/specplan
BUILD_FLAGS := $(if $(JOBS),--jobs $(JOBS))

.PHONY: plans coverage test lint format device-test fuzz sanitize bench wheel clean

plans: $(VENV)/.build-extra
	$(SPECPLAN) build --arch $(ARCH) --out $(PACKS) $(BUILD_FLAGS)
	$(SPECPLAN) coverage --arch $(ARCH) --packs $(PACKS)

coverage: $(VENV)/.build-extra
	$(SPECPLAN) coverage --strict --packs $(PACKS)

test: $(VENV)/.test-extra
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/.dev-extra
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/typecheck.py

format: $(VENV)/.dev-extra
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

device-test: $(VENV)/.test-extra
	SPECPLAN_PACKS=$(PACKS) $(BIN)/python -m pytest tests/device

# 100,000 random calls of every op, and every op in a process that can neither compile nor write.
fuzz: $(VENV)/.test-extra
	$(BIN)/python tests/device/fuzz.py --packs $(PACKS)
	$(BIN)/python tests/device/no_compile.py --packs $(PACKS)

# initcheck sees a tensor of its own only without torch's caching allocator, and must see torch's writes, so its findings are sorted by
# kernel afterwards: none may be ours. The control reads what nobody wrote, on purpose; if that is not found, initcheck finds nothing.
SANITIZE := $(BIN)/python tests/device/sanitize.py --packs $(PACKS)
# Two problems a family and every kind of launch of every compiled form; racecheck, the slowest, takes small cells only, and our kernels:
# it reports torch's reductions.
sanitize: $(VENV)/.test-extra
	for tool in memcheck synccheck; do \
	  compute-sanitizer --tool $$tool --error-exitcode 9 $(SANITIZE) --quick || exit 1; done
	compute-sanitizer --tool racecheck --kernel-regex kns=kernel_cutlass --error-exitcode 9 \
	  $(SANITIZE) --quick --most-requests 8
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck --print-limit 100000 \
	  $(SANITIZE) --unwritten | $(BIN)/python tests/device/sanitize.py --judge clean
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck --print-limit 100000 \
	  $(SANITIZE) --control | $(BIN)/python tests/device/sanitize.py --judge control

bench: $(VENV)/.test-extra
	$(BIN)/python benchmarks/step_copies.py --packs $(PACKS) --out benchmarks/results/step_copies.json
	$(BIN)/python benchmarks/rollback.py --packs $(PACKS) --out benchmarks/results/rollback.json
	$(BIN)/python benchmarks/gdn_replay.py --packs $(PACKS) --out benchmarks/results/gdn_replay.json
	$(BIN)/python benchmarks/sparse_gqa_verify.py --packs $(PACKS) --out benchmarks/results/sparse_gqa_verify.json

wheel: $(VENV)/.dev-extra
	$(BIN)/python -m build --wheel --outdir dist .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# One stamp an extra: what is installed follows pyproject.toml, and nothing is installed twice.
$(VENV)/.build-extra: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install $(PIP_FLAGS) -e '.[build]'
	@touch $@

$(VENV)/.test-extra: $(VENV)/.build-extra
	$(BIN)/pip install $(PIP_FLAGS) '$(TORCH)'
	$(BIN)/pip install $(PIP_FLAGS) -e '.[test]'
	@touch $@

$(VENV)/.dev-extra: $(VENV)/.test-extra
	$(BIN)/pip install $(PIP_FLAGS) -e '.[dev]'
	@touch $@

clean:
	rm -rf build dist $(PACKS) *.egg-info
