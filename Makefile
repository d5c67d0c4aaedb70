# Everything sets itself up: `make plans` and `make test` work in a fresh clone.
#
#   make plans                          compile every plan of every arch into packs/, print the coverage
#   make plans HOST=all                 the same with libraries for x86_64 and aarch64 servers
#   make aarch64-root                   what the tests of aarch64 libraries run in (qemu-user, 65 MB in build/)
#   make test                           the tests (no GPU needed; tests that need one skip and say which)
#   make lint                           format check, lint, types
#   make hooks                          lint before each commit
#   make pythons                        every promised Python that is found compiles to the certified bytes
#   make release                        the wheels that an index takes, checked and listed, in dist/
#   make simulate                       run every plan of every pack on a CPU, on small cells (hours of CPU time)
#   make device-test fuzz sanitize bench     on a machine with a GPU of a catalogued arch
#
# torch is not needed by `make plans`. `make test TORCH=torch==2.13.0` installs that version instead of the newest.

PYTHON ?= python3
TORCH ?= torch>=2.9
VENV ?= .venv
PACKS ?= packs
ARCH ?= all
JOBS ?=
HOST ?=
PIP_FLAGS ?= --quiet --disable-pip-version-check

BIN := $(VENV)/bin
SPECPLAN := $(BIN)/specplan
BUILD_FLAGS := $(if $(JOBS),--jobs $(JOBS)) $(foreach host,$(HOST),--host $(host))

.PHONY: serve-demo plans aarch64-root coverage simulate test lint types hooks format pythons device-test fuzz sanitize bench wheel release clean FORCE

plans: $(VENV)/.build-extra $(if $(HOST),$(VENV)/.cross-extra)
	$(SPECPLAN) build --arch $(ARCH) --out $(PACKS) $(BUILD_FLAGS)
	$(SPECPLAN) coverage --arch $(ARCH) --packs $(PACKS)

aarch64-root: $(VENV)/.build-extra
	PYTHON=$(BIN)/python tests/hosts/make_aarch64_root.sh build/aarch64-root

coverage: $(VENV)/.build-extra
	$(SPECPLAN) coverage --strict --packs $(PACKS)

# What the committed files in simulations/ come from; needs packs of these sources.
SAMPLE ?= 1/1
SIMULATIONS ?= simulations
simulate: $(VENV)/.test-extra
	$(SPECPLAN) simulate $(PACKS) --jobs $(or $(JOBS),1) --sample $(SAMPLE) --out $(SIMULATIONS)

# A worker gets neighbouring tests, which share what they compile, and takes others' when it has none left.
test: $(VENV)/.test-extra
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/.dev-extra
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/typecheck.py

types: $(VENV)/.dev-extra
	$(BIN)/python tools/typecheck.py

hooks: $(VENV)/.dev-extra
	$(BIN)/pre-commit install

pythons: $(VENV)/.build-extra
	$(BIN)/python tests/packaging/pythons.py --packs $(PACKS)

format: $(VENV)/.dev-extra
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

device-test: $(VENV)/.test-extra
	SPECPLAN_PACKS=$(PACKS) $(BIN)/python -m pytest tests/device

# 100,000 random calls of every op, mixed ones among them, with a fresh seed that it prints, and every op in a process that can neither compile nor write.
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

# The engine of examples/engine with a model of a few layers and random weights; without a GPU it runs on the references, and says so.
serve-demo: $(VENV)/.test-extra
	cd examples && ../$(BIN)/python -m engine serve --model tiny --port 8000

bench: $(VENV)/.test-extra
	$(BIN)/python benchmarks/step_copies.py --packs $(PACKS) --out benchmarks/results/step_copies.json
	$(BIN)/python benchmarks/rollback.py --packs $(PACKS) --out benchmarks/results/rollback.json
	$(BIN)/python benchmarks/gdn_replay.py --packs $(PACKS) --out benchmarks/results/gdn_replay.json
	$(BIN)/python benchmarks/sparse_gqa_verify.py --packs $(PACKS) --out benchmarks/results/sparse_gqa_verify.json
	$(BIN)/python benchmarks/whole_step.py --packs $(PACKS) --out benchmarks/results/whole_step.json
	$(BIN)/python benchmarks/accept.py --packs $(PACKS) --out benchmarks/results/accept.json
	$(BIN)/python benchmarks/step_setup.py --packs $(PACKS) --out benchmarks/results/step_setup.json
	$(BIN)/python benchmarks/between_steps.py --packs $(PACKS) --out benchmarks/results/between_steps.json

wheel: $(VENV)/.test-extra
	$(BIN)/python -m build --outdir dist .

release: $(VENV)/.release-extra
	$(BIN)/python tools/release.py --out dist $(foreach host,$(HOST),--host $(host))

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# One stamp an extra: what is installed follows pyproject.toml, and nothing is installed twice.
$(VENV)/.build-extra: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install $(PIP_FLAGS) -e '.[build]'
	@touch $@

# Only where the distribution's own cross compilers are not at hand.
$(VENV)/.cross-extra: $(VENV)/.build-extra
	{ command -v aarch64-linux-gnu-gcc && command -v x86_64-linux-gnu-gcc; } > /dev/null || \
	  $(BIN)/pip install $(PIP_FLAGS) -e '.[build,cross]'
	@touch $@

# Names the torch that was asked for last: another one is installed, whatever was installed before. Looked at by every run.
$(VENV)/.torch: FORCE | $(VENV)/.build-extra
	@[ "$$(cat $@ 2>/dev/null)" = '$(TORCH)' ] || \
	  { $(BIN)/pip install $(PIP_FLAGS) '$(TORCH)' && echo '$(TORCH)' > $@; }

$(VENV)/.test-extra: $(VENV)/.build-extra | $(VENV)/.torch
	$(BIN)/pip install $(PIP_FLAGS) -e '.[test]'
	@touch $@

$(VENV)/.dev-extra: $(VENV)/.test-extra
	$(BIN)/pip install $(PIP_FLAGS) -e '.[dev]'
	@touch $@

$(VENV)/.release-extra: $(VENV)/.build-extra
	$(BIN)/pip install $(PIP_FLAGS) -e '.[release]'
	@touch $@

clean:
	rm -rf build dist $(PACKS) *.egg-info
