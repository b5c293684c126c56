# The verbs of the project. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TRAIN_POOL ?= training
export REWARD_POOL ?= rewards
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_OFFLINE ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false

# What the workers of the standing Dask cluster have imported before they take work.
STANDING_IMPORTS := --preload flows.iteration --preload flows.warm_start $(addprefix --share ,resources.engines.local \
  resources.rollout.worker resources.rollout.group_queue tasks.training.learner tasks.warm_start.train)

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint bench up down status clean

help: ## List the verbs
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## Create the virtual environment and install everything (once)

# A virtual environment needs Python's ensurepip, which Debian and Ubuntu ship as a package of its own.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "Python's venv module is not installed; installing python3-venv"; \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq python3-venv; \
	  else echo "run: sudo apt-get install python3-venv"; exit 1; fi; }
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null || echo "note: bubblewrap is not installed; untrusted code runs in the next best sandbox (sudo apt-get install bubblewrap)"; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing packages (about 2 GB, some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# Environments of libraries that need pandas: a virtual environment on top, which only their tests look into
# (tests/other_libraries.py). What they need is written in pyproject.toml.
$(VENV)/adapters/.installed: $(VENV)/.installed
	@echo "installing the libraries of environments that the tests play (about 230 MB)"
	@$(BIN)/python -m venv --without-pip $(VENV)/adapters
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$site" > "$$($(VENV)/adapters/bin/python -c "$$site")/below.pth"
	@$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*extras["skyrl_gym"], *extras["openenv"], sep="\n")' | \
	$(BIN)/python -m pip --python $(VENV)/adapters/bin/python install --quiet --requirement /dev/stdin
	@touch $@

quickstart: setup ## Train a tiny policy on four task families (about 3 minutes on two cores)
	@$(BIN)/python -m flows.train examples/quickstart/run.yaml $(ARGS)

test: setup $(VENV)/adapters/.installed lint ## Check style, types and imports, and run all tests
	@$(BIN)/python -m pytest $(ARGS)

lint: setup ## Style, types and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/pyright --warnings >/tmp/rollart-pyright.$$$$ 2>&1 || { cat /tmp/rollart-pyright.$$$$; rm -f /tmp/rollart-pyright.$$$$; exit 1; }; rm -f /tmp/rollart-pyright.$$$$
	@$(BIN)/lint-imports --no-cache

bench: setup ## Run one benchmark: make bench NAME=engine
	@test -n "$(NAME)" || { echo "name a benchmark: make bench NAME=..., one of:"; grep -l __main__ benchmarks/*.py | grep -v peers_ | xargs -n1 basename | sed 's/\.py//; s/^/  /'; exit 1; }
	@$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

up: setup ## Start a standing local stack (Prefect server, workers, Dask cluster) and register the deployments there
	@out=$$($(BIN)/python -m resources.pools.local_stack up $(STANDING_IMPORTS) $(ARGS)) || exit $$?; echo "$$out"; \
	log=$$(mktemp); export PREFECT_API_URL=$$(awk '/^Prefect API/ {print $$3}' <<<"$$out"); \
	state=$$(sed -n 's|^logs *\(.*\)/logs$$|\1|p' <<<"$$out"); \
	if compgen -G "$$state/drivers/*.json" >/dev/null; then $(BIN)/python -m flows.drivers "$$state"; fi; \
	$(BIN)/prefect --no-prompt deploy --all >$$log 2>&1 || { cat $$log; rm -f $$log; exit 1; }; rm -f $$log; \
	echo "deployments  $$(sed -n 's/^    entrypoint: flows\.\(.*\)/\1/p' prefect.yaml | wc -l) of prefect.yaml are registered (prefect deployment ls)"

down: setup ## End the standing local stack
	@$(BIN)/python -m resources.pools.local_stack down

status: setup ## Say what the standing local stack runs
	@$(BIN)/python -m resources.pools.local_stack status

clean: ## Remove the virtual environment (runs and stores stay)
	rm -rf $(VENV)
