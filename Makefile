# Needs git, make and Python 3.11 or later; everything else goes into .venv, and only what the target uses.
# Another Python: make train PYTHON=/path/to/python3.12

ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
endif

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
WORKERS ?= 2
MPI ?= auto
HISTORIES ?= 200
KILLS ?= 200
CASES ?= 5000
PYTEST := $(BIN)/python -m pytest

.PHONY: help train test test-gpu horovod soak check format bench clean

help:
	@echo "make train      train a digit classifier on two synchronized processes"
	@echo "make test       all tests that need no GPU"
	@echo "make test-gpu   the tests that need one"
	@echo "make horovod    build Horovod for this torch and install it; MPI=1 with MPI, MPI=0 without; minutes, once"
	@echo "make soak       thousands of drawn cases (CASES), hundreds of kills, each compared with the undisturbed run"
	@echo "make check      lint, format, types, who may import whom"
	@echo "make format     put the code into shape"
	@echo "make bench      throughput, overhead, scaling, checkpoints and recovery, beside their peers; long"
	@echo "make clean      remove .venv, caches and build outputs; runs/ stays"

train: .venv/installed-train
	$(BIN)/distributed train --script examples/01-ddp-basics/ddp_mnist.py --num-gpus 2

test: .venv/installed-all
	bash tests/system_tools.sh
	@bash scripts/build_horovod.sh --mpi $(MPI) || test $$? -eq 3  # 3: no compiler here; the tests that need it say so
	@$(BIN)/python -m distributed.strategies.deepspeed_ops || echo "the tests that need DeepSpeed's own operators say so"
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not gpu and not soak" --durations=40

test-gpu: .venv/installed-all
	$(PYTEST) -m gpu

horovod: .venv/installed-train
	@bash scripts/build_horovod.sh --mpi $(MPI)

soak: .venv/installed-all
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.adversarial.soak --cases $(CASES)
	$(PYTEST) -m soak
	folder=$$(mktemp -d) && OMP_NUM_THREADS=1 $(BIN)/python tests/e2e/kill_histories.py $$folder/kills --histories $(HISTORIES)
	folder=$$(mktemp -d) && $(BIN)/distributed chaos --script tests/e2e/soak_train.py --faults kill --kills $(KILLS) \
		--steps $$((15 * $(KILLS))) --run-dir $$folder/chaos

check: .venv/installed-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-all horovod
	$(BIN)/distributed bench throughput
	$(BIN)/distributed bench collectives
	$(BIN)/distributed bench overhead
	$(BIN)/distributed bench overhead --engine deepspeed
	$(BIN)/distributed bench overhead --engine horovod
	$(BIN)/distributed bench overhead --engine ray
	$(BIN)/distributed bench start
	$(BIN)/distributed bench scaling
	$(BIN)/distributed bench checkpoint
	$(BIN)/distributed bench recovery
	$(BIN)/distributed bench tune

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .grimp_cache build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp for each set of extras, made anew when what they are made from changes.
.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is not on the PATH: make PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "no venv module? On Debian: apt-get install python3-venv" >&2; exit 1; }

.venv/installed-train: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what training needs into .venv"
	$(PIP) --editable ".[examples,tensorboard]"
	@touch $@

.venv/installed-all: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what tests, checks and benchmarks need into .venv"
	$(PIP) --editable ".[dev,examples,tensorboard,mlflow,notebook,peers,lora,deepspeed,ray,tune]" tensorflow-cpu
	$(PIP) --no-deps tf-keras  # legacy Keras; it names tensorflow, which tensorflow-cpu is not called
	@touch $@ .venv/installed-train
