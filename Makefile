# Needs git, make and Python 3.11 or later; everything else goes into .venv, and only what the target uses.
# Another Python: make train PYTHON=/path/to/python3.12

ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
endif

BIN := .venv/bin
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS)
# Of tests, on two cores: some wait while others compute.
WORKERS ?= 3
MPI ?= auto
HISTORIES ?= 200
KILLS ?= 200
CASES ?= 5000
PYTEST := $(BIN)/python -m pytest
# Every worker reads all tests, and every rank some of them: they are compiled once, whatever the caller's Python does.
export PYTHONDONTWRITEBYTECODE :=
# Every worker collects all files; those of a GPU are collected once, by make lint.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not gpu and not soak" --ignore=tests/gpu
SUITE := $(BIN)/python -m benchmarks.suite

.PHONY: help train unit test test-gpu horovod soak mutants lint check format bench clean

help:
	@echo "make train      train a digit classifier on two synchronized processes"
	@echo "make unit       the tests that start no ranks"
	@echo "make test       all tests that need no GPU"
	@echo "make test-gpu   the tests that need one; leaves a record in benchmarks/gpu-suite.json"
	@echo "make horovod    build Horovod for this torch and install it; MPI=1 with MPI, MPI=0 without; minutes, once"
	@echo "make soak       thousands of drawn cases (CASES), hundreds of kills, each compared with the undisturbed run"
	@echo "make mutants    seeded faults, each of which the tests must find; MUTANTS='--area data' for some of them"
	@echo "make lint       style, types, who may import whom, and how old the record of the GPU suite is"
	@echo "make check      make lint, then make unit"
	@echo "make format     put the code into shape"
	@echo "make bench      throughput, overhead, scaling, checkpoints and recovery, beside their peers; long"
	@echo "make clean      remove .venv, caches and build outputs; runs/ stays"

train: .venv/installed-train
	$(BIN)/distributed train --script examples/01-ddp-basics/ddp_mnist.py --num-gpus 2

unit: .venv/installed-all
	@$(BIN)/python -m compileall -q src || true  # once for all the processes that tests start, also where none may write it
	$(PYTEST) $(PARALLEL) tests/unit

test: .venv/installed-all
	bash tests/system_tools.sh
	@bash scripts/build_horovod.sh --mpi $(MPI) || test $$? -eq 3  # 3: no compiler here; the tests that need it say so
	@$(BIN)/python -m distributed.engines.deepspeed.ops || echo "the tests that need DeepSpeed's own operators say so"
	@$(BIN)/python -m compileall -q src || true  # once for all the processes that tests start, also where none may write it
	$(PYTEST) $(PARALLEL) --durations=40

test-gpu: .venv/installed-all
	$(PYTEST) -p tests.gpu_plugin -m gpu --gpu-record benchmarks/gpu-suite.json

horovod: .venv/installed-train
	@bash scripts/build_horovod.sh --mpi $(MPI)

soak: .venv/installed-all
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.adversarial.soak --cases $(CASES)
	$(PYTEST) -m soak
	folder=$$(mktemp -d) && OMP_NUM_THREADS=1 $(BIN)/python tests/e2e/kill_histories.py $$folder/kills --histories $(HISTORIES)
	folder=$$(mktemp -d) && $(BIN)/distributed chaos --script tests/e2e/soak_train.py --faults kill --kills $(KILLS) \
		--steps $$((15 * $(KILLS))) --run-dir $$folder/chaos

mutants: .venv/installed-all
	nice -n 19 $(BIN)/python -m tests.mutants $(MUTANTS)

lint: .venv/installed-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(PYTEST) --collect-only --quiet --quiet tests/gpu > /dev/null || $(PYTEST) --collect-only --quiet tests/gpu
	@$(BIN)/python -m tests.gpu_record

check: lint unit

format: .venv/installed-all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-all horovod
	$(SUITE) throughput
	$(BIN)/distributed bench collectives
	$(SUITE) overhead
	$(SUITE) overhead --engine deepspeed
	$(SUITE) overhead --engine horovod
	$(SUITE) overhead --engine ray
	$(SUITE) start
	$(BIN)/distributed bench scaling
	$(BIN)/distributed bench checkpoint
	$(SUITE) bitwise
	$(BIN)/distributed bench recovery
	$(SUITE) tuning

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .grimp_cache build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp for each set of extras, made anew when what they are made from changes.
.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is not on the PATH: make PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "no venv module? On Debian: apt-get install python3-venv" >&2; exit 1; }

.venv/installed-train: pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	@echo "installing what training needs into .venv"
	$(PIP) --editable ".[examples,tensorboard]"
	@touch $@

.venv/installed-all: pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	@echo "installing what tests, checks and benchmarks need into .venv"
	$(PIP) --editable ".[dev,examples,tensorboard,mlflow,notebook,peers,pictures,lora,deepspeed,ray,tune,onnx]" tensorflow-cpu
	$(PIP) --no-deps tf-keras  # legacy Keras; it names tensorflow, which tensorflow-cpu is not called
	@touch $@ .venv/installed-train
