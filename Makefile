# make train   set up .venv and run the default job          make test    set up and run the tests
# make setup   only .venv       make lint    ruff and mypy   make bench   the CPU benchmarks
# make test-gpu  the tests that need a CUDA GPU, with the python that has a torch for it (PYTHON=...), in any order
# make test-cluster  the tests on nodes of their own, as root: SLURM, ssh, Ray; `make cluster-tools` installs these where it can
# make explore what tests hold for random examples, for new ones: eight rounds
# make parity  every layout against one process: the whole same-loss matrix, half an hour; writes benchmarks/results/parity.md
# make pages   pages that are made from the code: the house, the reference, the planner's rules of thumb and misprints
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

.PHONY: setup train test test-gpu test-cluster cluster-tools explore parity pages lint bench clean
.DELETE_ON_ERROR:

setup: $(VENV)/.installed

# A system python without ensurepip (Debian's, without python3-venv) still has pip: let that one fill the environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11"; echo "  why  shardwise needs Python 3.11 or newer"; echo "  fix  make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --quiet --python $(BIN)/python install pip; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "setup    installing into $(VENV) (once)"
	@$(PIP) install --constraint constraints.txt 'setuptools>=77'
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[lowbit]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "setup    installing the test tools into $(VENV) (once)"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

train: $(VENV)/.installed
	@$(BIN)/shardwise train

# Lanes share the files of tests (tests/lanes.py). The first one is shown at once, the reports of the others come after it.
LANES  ?= 2
NOTES  := $(VENV)/lanes

# in_lanes: how many lanes, the notes' directory, the command that runs pytest, the one that says what tests cost.
define in_lanes
	@rm -rf $(2); mkdir -p $(2)/taken; others=; \
	  for lane in $$(seq 2 $(1)); do \
	    $(3) --lane $$lane --lanes-at $(2)/taken >$(2)/$$lane.log 2>&1 & others="$$others $$!"; \
	  done; trap 'kill $$others' INT TERM; \
	  $(3) --lane 1 --lanes-at $(2)/taken; code=$$?; \
	  for other in $$others; do wait $$other || code=$$?; done; \
	  $(4); for lane in $$(seq 2 $(1)); do cat $(2)/$$lane.log; done; exit $$code
endef

# Tests start Python some hundred times: it keeps what it has compiled, also where the environment says it shall not.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.installed-dev
	$(call in_lanes,$(LANES),$(NOTES),$(BIN)/python -m pytest tests,$(BIN)/python tests/costs.py $(NOTES))

# The environment above has a torch for CPUs: these need another one, which need not have this package installed.
GPU_LANES ?= 4

test-gpu:
	$(call in_lanes,$(GPU_LANES),build/gpu-lanes,PYTHONPATH=$(CURDIR)/src $(PYTHON) -m pytest tests -m "cuda or triton" --shuffle 0,$(PYTHON) tests/costs.py build/gpu-lanes)

# What is not there is named at the end, with how to get it. Three lanes for two cores: these tests often wait, for what
# a scheduler looks at twice a minute, or for a machine to be taken for lost.
test-cluster: export PYTHONDONTWRITEBYTECODE :=
test-cluster: $(VENV)/.installed-dev
	$(call in_lanes,3,$(VENV)/cluster-lanes,$(BIN)/python -m pytest tests/nodes -rs,true)

cluster-tools: $(VENV)/.installed-dev
	@tests/nodes/install.sh $(VENV)

explore: $(VENV)/.installed-dev
	@for round in 1 2 3 4 5 6 7 8; do $(BIN)/python -m pytest -m hypothesis --hypothesis-profile=explore --hypothesis-seed=random || exit 1; done

parity: $(VENV)/.installed-dev
	@$(BIN)/python tests/parity/full.py

pages: $(VENV)/.installed-dev
	@for script in tests/docs/house.py tests/docs/reference.py benchmarks/misprints.py benchmarks/rules_of_thumb.py; do $(BIN)/python $$script || exit 1; done

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# Comparisons with others, what needs files of others, and what writes pages are started by hand.
BY_HAND := preflight same_numbers peers_cpu any_model fine_tune planner_accuracy misprints rules_of_thumb

bench: $(VENV)/.installed-dev
	@for script in $(filter-out $(BY_HAND:%=benchmarks/%.py),$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build dist src/*.egg-info
