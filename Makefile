# Every target sets up what it needs in $(VENV) first; `make demo` and `make test` work on a fresh clone, in either order.
# Overridable, e.g. `make test PYTHON=python3.12`: PYTHON (the interpreter that makes the environment), VENV (where it
# goes), OUT (where the demo's report goes), WORKERS (how many processes test side by side; each takes up to 1 GB), AUDIT
# (which tests of the audit, as pytest's -k; "not sm_80" leaves sm_80 and sm_100 out).

PYTHON ?= python3
VENV := .venv
OUT := out/demo
WORKERS := auto
AUDIT :=

# No `python -m pytest`: it would put this folder on Python's path, and with it a bare `kernels`, `numerics` and so on.
BIN := $(VENV)/bin
TRAINERS := .venv-trainers
DOCS := .venv-docs
PIP := -m pip install --disable-pip-version-check --quiet -c constraints.txt
INSTALL := $(BIN)/python $(PIP)

# Each worker begins with its share of the files, in order, and takes tests from the other when it has none left.
TESTS := $(BIN)/pytest -q -m "not exhaustive" --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal -p no:benchmark

# The compiled kernels in software; tests/support/software_gpu. It needs a compiler, as Triton's own launcher does.
GPUS := sm_80 sm_90 sm_100 gfx942
ON_GPU := $(BIN)/pytest -q --numprocesses $(WORKERS) --maxprocesses 2 --dist load -p no:benchmark --software-gpu

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test unit-tests trainers wheels docs software-gpu coverage exhaustive soak versions lint audit bounds clean

help:
	@echo "make demo        train a small GPT in fp32, bf16 and fp16, and compare them: $(OUT)/report.html"
	@echo "make test        all tests except the exhaustive ones: some five minutes on two cores"
	@echo "make trainers    the tests with Accelerate, transformers, Lightning and others, installed into $(TRAINERS)"
	@echo "make docs        build the documentation site, out/site/index.html, and check its links"
	@echo "make software-gpu  the kernels as compiled for four GPU generations, executed on the CPU: some four minutes"
	@echo "make coverage    which lines the tests run: out/coverage/html; fails below fail_under in pyproject.toml"
	@echo "make exhaustive  all 2^32 inputs and the cases that make test omits: hours"
	@echo "make soak        the campaigns of docs/robustness.md: overflows on four ranks, interrupts, bad files, graphs; hours"
	@echo "make versions    the tests on the oldest and newest torch, Triton and Python, each in its own environment: hours"
	@echo "make lint        ruff, mypy, and a check for meaningless names"
	@echo "make audit       compile every kernel for four GPU generations, without a GPU"
	@echo "make bounds      record what they compile to as bounds for the tests, and in docs/performance.md"
	@echo "make wheels      dist/: the sdist, and the wheel with the CPU kernels compiled for three levels of x86-64 (a minute)"
	@echo "make clean       delete build products and caches; leaves $(VENV), $(TRAINERS), $(DOCS) and out"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras, renewed when what is to be installed changes. All installs are editable, so that the code
# that runs is the code that is here. Each set holds the ones before it: what `test` installs needs no second visit for
# `plots`.
$(VENV)/.plots: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing halfstep and what the demo needs into $(VENV) ..."
	$(INSTALL) -e '.[plots]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing halfstep and what the tests need into $(VENV) ..."
	$(INSTALL) -e '.[plots,test]'
	@touch $(VENV)/.plots $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing halfstep and its development tools into $(VENV) ..."
	$(INSTALL) -e '.[plots,test,dev]'
	@touch $(VENV)/.plots $(VENV)/.test $@

demo: $(VENV)/.plots
	$(BIN)/python examples/train_gpt.py --precision compare --out $(OUT)
	@echo "The report is $(OUT)/report.html (also report.json)."

unit-tests: $(VENV)/.test
	$(TESTS)

# Also each kernel as compiled for one GPU, which `make software-gpu` does too.
test: unit-tests
	$(ON_GPU) sm_90 -k every_kernel tests/software_gpu/test_kernels.py

wheels: $(VENV)/.test
	HALFSTEP_PREBUILT=required $(BIN)/python -m build --no-isolation

# In an environment of their own, because they are many packages and none that the other tests need. It also has the
# packages of $(VENV), so that torch is installed once.
$(TRAINERS)/.installed: $(VENV)/.test
	@echo "Installing the trainers into $(TRAINERS) ..."
	test -x $(TRAINERS)/bin/python || $(BIN)/python -m venv $(TRAINERS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($(TRAINERS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(TRAINERS)/bin/python $(PIP) -e '.[trainers]'
	@touch $@

# A library's runs on ranks are made once, by the process that takes all of its tests; see the tests' conftest.py.
trainers: $(TRAINERS)/.installed
	$(TRAINERS)/bin/python $(BIN)/pytest -q --numprocesses $(WORKERS) --maxprocesses 2 --dist loadgroup -p no:benchmark \
		tests/integrations/trainers

# What the site needs is no part of halfstep, so it has an environment of its own, without torch.
$(DOCS)/.installed: docs/site/requirements.txt
	@echo "Installing what the site needs into $(DOCS) ..."
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --disable-pip-version-check --quiet -r $<
	@touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict
	@echo "The site is out/site/index.html."

# Every kernel as compiled for each target, and what the software GPU itself must get right.
software-gpu: $(VENV)/.test
	$(ON_GPU) sm_90 -m "not exhaustive" -k "not test_golden or (triton and not (toward_zero and saturating))" \
		tests/software_gpu tests/test_golden.py
	$(ON_GPU) sm_80 -k every_kernel tests/software_gpu
	$(ON_GPU) sm_100 -k every_kernel tests/software_gpu
	$(ON_GPU) gfx942 -m "not exhaustive" -k "amd or every_kernel" tests/software_gpu

# Tracing makes Python code about twice as slow. A failed test does not keep the lines from being counted, but fails here.
coverage: $(VENV)/.test
	rm -rf out/coverage && mkdir -p out/coverage
	$(BIN)/coverage run $(TESTS); status=$$?; $(BIN)/coverage combine --quiet && $(BIN)/coverage html --quiet \
		&& $(BIN)/coverage report && exit $$status

exhaustive: $(VENV)/.test
	$(BIN)/pytest -q -m exhaustive --timeout 0
	$(foreach target,$(GPUS),$(ON_GPU) $(target) --timeout 0 tests/software_gpu &&) true
	$(foreach target,$(GPUS),$(ON_GPU) $(target) --timeout 0 -k triton tests/test_golden.py &&) true
	AMDGCN_USE_BUFFER_OPS=0 $(ON_GPU) gfx942 -k every_kernel tests/software_gpu  # as over tensors of 2 GiB and more
	$(foreach target,$(GPUS),$(ON_GPU) $(target) -m "not exhaustive" -k "triton or interpreter" \
		--ignore tests/kernels/test_compile.py tests/kernels tests/integrations tests/numerics &&) true

soak: $(VENV)/.test
	$(BIN)/python tests/support/soak.py --faults 10000 --out out/soak
	$(BIN)/python tests/support/interrupts.py --tries 2000
	$(BIN)/python tests/support/interrupts.py --tries 2000 --backend reference
	$(BIN)/python tests/support/interrupts.py --tries 2000 --offloaded
	$(BIN)/python tests/support/interrupts.py --tries 2000 --offloaded --sharded
	$(BIN)/python tests/support/interrupts.py --tries 2000 --muon
	$(BIN)/python tests/support/interrupt_checkpoints.py --tries 2000
	$(BIN)/python tests/support/fuzz_checkpoints.py --tries 10000
	$(BIN)/python tests/support/stream_training.py --tries 10000
	$(BIN)/python tests/support/device_programs.py --tries 1000
	$(BIN)/python tests/support/defaults.py
	HALFSTEP_BACKEND=reference $(BIN)/python tests/support/defaults.py
	TRITON_INTERPRET=1 HALFSTEP_BACKEND=triton $(BIN)/python tests/support/defaults.py --tries 1

versions:
	$(PYTHON) tests/support/versions.py --out out/versions

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/support/empty_names.py

# `halfstep bench audit`, held to the recorded bounds and to rules that need no record: all targets, or those of AUDIT.
audit: $(VENV)/.test
	$(BIN)/pytest -q -p no:benchmark -m exhaustive -k "$(AUDIT)" --timeout 0 tests/kernels/test_compile.py

bounds: $(VENV)/.test
	$(BIN)/halfstep bench audit --record tests/kernels/audit_bounds.json
	cd tests/support && $(abspath $(BIN))/python -m software_gpu.counts \
		--record ../kernels/instruction_counts.json --markdown ../../docs/performance.md

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find bench integrations kernels numerics src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
