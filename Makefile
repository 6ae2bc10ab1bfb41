# `make demo` and `make test` work on a fresh clone with nothing but Python 3.11 or newer.

# The first Python on the path that runs, is new enough and can make a virtual environment; PYTHON=... overrides it.
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,\
	$(shell $(name) -c '$(USABLE)' 2>/dev/null && echo $(name))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := benchmarks/peers/.venv
PEERS_STAMP := $(PEERS)/.installed
INTEROP := tests/interop/.venvs
INTEROP_STAMPS := $(patsubst tests/interop/environments/%.txt,$(INTEROP)/%/.installed,\
	$(wildcard tests/interop/environments/*.txt))
TORCH ?= 2.6.0
OTHER_TORCH := .venv-torch-$(TORCH)
ON_TORCH := deepspeed megatron megatron11 megatron16 megatron_fsdp ray ray_train verl torchao torchtitan trl
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Each file of these lists has a hash: pip refuses another. The last two have a build of torch each.
HASHED := --no-deps --require-hashes
LISTS := requirements-ci.txt requirements-cpu.txt requirements-cuda.txt
# $(call with_torch,COMMAND): a command of pip, with the list of the build of torch that this machine can have.
with_torch = $(1) -r requirements-cpu.txt || \
	{ echo "the build of torch without CUDA could not be had (see above): taking the registry's build" >&2; \
	$(1) -r requirements-cuda.txt; }

# Tests start several ranks at a time, so each rank uses one thread.
export OMP_NUM_THREADS ?= 1
# They also start hundreds of processes, each of which would compile the package without bytecode files.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-unit test-all test-interop test-torch test-page bench bench-peers check check-wheel docs format clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(STAMP)  ## make .venv with everything that the other targets need

$(STAMP): pyproject.toml $(LISTS)
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
		{ echo "shardproof needs Python 3.11 or newer with its venv module on the path" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(HASHED) -r requirements-ci.txt
	$(call with_torch,$(PIP) $(HASHED))
	$(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	touch $@

demo: $(STAMP)  ## train, save, be killed, resume on other layouts, prove it
	$(BIN)/python -m examples.demo $(ARGS)

test: $(STAMP)  ## everything but the slow repeats and test-interop
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not interop and not browser" $(ARGS)

test-unit: $(STAMP)  ## the tests without other processes, in about two minutes
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not processes" tests/unit $(ARGS)

test-all: $(STAMP)  ## every test but test-interop, the slow ones too
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not interop and not browser" --hypothesis-profile thorough $(ARGS)

test-interop: $(STAMP) $(INTEROP_STAMPS)  ## released packages of other projects read what we write
	$(BIN)/python -m pytest -n 2 -m interop tests/interop $(ARGS)

# Each file lists every package of its environment, so pip resolves nothing, and bounds that a release has outlived do
# not count. Environments in ON_TORCH see the packages of torch.txt too.
$(ON_TORCH:%=$(INTEROP)/%/.installed): $(INTEROP)/torch/.installed
$(INTEROP)/%/.installed: tests/interop/environments/%.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	for site in $(if $(filter $*,$(ON_TORCH)),$(@D)/lib/python*/site-packages); do \
		echo "../../../../torch/$${site#$(@D)/}" > $$site/torch.pth; \
	done
	$(@D)/bin/python -m pip install --quiet --no-deps --ignore-requires-python -r $<
	touch $@

# torch 2.6.0 asks for one version of sympy, which is another than the pinned one.
$(OTHER_TORCH)/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	sed -E '/^(torch|sympy)==/d' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt torch==$(TORCH)
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt -e '.[dev]'
	touch $@

test-torch: $(OTHER_TORCH)/.installed  ## the tests with another torch: make test-torch TORCH=2.6.0
	$(OTHER_TORCH)/bin/python -m pytest -n 3 --dist worksteal -p tests.newer_torch -m "not slow and not interop and not browser" $(ARGS)

test-page: $(STAMP)  ## the page of `shardproof page` in a browser: Debian's chromium, or that of playwright
	$(PIP) $(HASHED) -r requirements-page.txt
	$(BIN)/python -m pytest -m browser tests/page $(ARGS)

bench: $(STAMP)  ## compare with torch's own checkpoints, optimizers and sharding
	@set -e; for script in save load save_load_again reshard crossover small_tensors costs planning; do \
		echo "== $$script"; $(BIN)/python benchmarks/$$script.py $(ARGS); \
	done
	@echo "== optim"; $(BIN)/python benchmarks/optim.py
	@echo "== rerun"; $(BIN)/python benchmarks/rerun.py
	@echo "== load, cold"; $(BIN)/python benchmarks/load.py --cold
	@echo "== reshard, cold"; $(BIN)/python benchmarks/reshard.py --cold
	@echo "== restart"; $(BIN)/python benchmarks/restart.py
	@echo "== startup"; $(BIN)/python benchmarks/startup.py

# Peers ask for versions that exclude each other, so they have an environment of their own. unbound.txt lists
# the peers that are installed without their bounds.
$(PEERS_STAMP): benchmarks/peers/requirements.txt benchmarks/peers/unbound.txt pyproject.toml
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -r benchmarks/peers/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --no-deps --ignore-requires-python -r benchmarks/peers/unbound.txt
	$(PEERS)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

bench-peers: $(PEERS_STAMP)  ## compare with every released peer, in an environment of its own
	@set -e; for script in list save load steps memory; do \
		echo "== peers_$$script"; $(PEERS)/bin/python benchmarks/peers_$$script.py $(ARGS); \
	done
	@echo "== peers_save, apart"; $(PEERS)/bin/python benchmarks/peers_save.py --apart \
		--only ShardproofFence,ShardproofStage,MegatronAsync,TorchDcpThread
	@echo "== peers_save, small"; $(PEERS)/bin/python benchmarks/peers_save.py --state small --repeats 3
	@echo "== peers_load, small"; $(PEERS)/bin/python benchmarks/peers_load.py --state small --repeats 3

check: $(STAMP) check-wheel  ## format, lint, types, layers, docs, and the built wheel
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_layers.py tests/unit/test_docs.py tests/unit/test_site.py

# The wheel names what it needs, and pip finds it only among files with the hashes of the lists.
check-wheel: WHEEL_PIP := build/wheel/venv/bin/python -m pip --disable-pip-version-check
check-wheel: $(STAMP)  ## the example of the README from a built wheel, in an environment with nothing else
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	$(WHEEL_PIP) download --quiet $(HASHED) -d build/wheel/packages -r requirements-ci.txt
	$(call with_torch,$(WHEEL_PIP) download --quiet $(HASHED) -d build/wheel/packages)
	PIP_CONFIG_FILE=/dev/null $(WHEEL_PIP) install --isolated --quiet --no-index --find-links build/wheel/packages \
		build/wheel/*.whl
	rm -r build/wheel/packages
	$(WHEEL_PIP) check
	sed -n '/^```python/,/^```/p' README.md | grep -v '^```' > build/wheel/example.py
	cd build/wheel && venv/bin/python example.py && venv/bin/shardproof verify runs/example
	cd build/wheel && venv/bin/shardproof page runs/example -o page.html

docs: $(STAMP)  ## the documentation site in build/site, built without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(STAMP)  ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what the other targets made, .venv too
	rm -rf $(VENV) .venv-torch-* $(PEERS) $(INTEROP) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
