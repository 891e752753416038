# Everything runs from a virtual environment that the first target to need it makes.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MODEL ?=
ARGS ?=

BIN := $(VENV)/bin

# pip's words are of interest only if it fails: an editable install warns at length.
pip_install = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
	-e "$(1)" >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }

has_compiler = $(BIN)/python -c \
	"from penstock.kernels.cpu.build import find_compiler; find_compiler()" 2>/dev/null

.PHONY: install serve test check format path bench bench-peers gpu gpu-tests gpu-bench clean

install: $(VENV)/.installed

serve: $(VENV)/.installed
	@exec $(BIN)/penstock serve $(MODEL) --port $(PORT) $(ARGS)

test: $(VENV)/.installed-test
	@tests/system_packages.sh
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.namespace $(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The files of ours that a request meets, in order: `make path ARGS=chat`.
path: $(VENV)/.installed-test
	$(BIN)/python -m tests.support.request_path $(ARGS)

# Start-up time, memory and tokens per second of a server on this machine.
bench: $(VENV)/.installed
	$(BIN)/python -m penstock.load.bench.quick $(if $(MODEL),--model $(MODEL)) $(ARGS)

# Rivals and ours side by side on this machine. Each gets an environment under build/peers, the first
# time: a quarter of an hour, and seven gigabytes.
bench-peers: $(VENV)/.installed-test
	$(BIN)/python -m penstock.load.peers.matrix $(ARGS)

# On a machine with a GPU, with its own python3 and torch: no install, and no plugin but pytest. What
# is written to the folder $OUT, if there is one, is the tests' report and the figures. ARGS go to
# one of the two: `make gpu-bench ARGS='--only attention'`.
gpu: gpu-tests gpu-bench

gpu-tests:
	PYTHONPATH=.namespace python3 -m pytest -c /dev/null --rootdir . --import-mode importlib \
	  -p no:cacheprovider -m gpu $(if $(OUT),--junit-xml=$(OUT)/gpu-tests.xml) \
	  $$(grep -rl 'mark\.gpu' --include 'test_*.py' tests) tests/kernels/gpu $(ARGS)

gpu-bench:
	PYTHONPATH=.namespace python3 -m penstock.load.gpu $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .namespace/*.egg-info

# Debian splits ensurepip from python3: without it, the environment gets its pip from outside.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "penstock needs Python 3.11 or newer")'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
	  $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install -q pip; } || { rm -rf $(VENV); \
	  echo "cannot make a virtual environment: install python3-venv or pip"; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing penstock into $(VENV) (a few minutes the first time) ..."
	@$(call pip_install,.[bench])
	@$(has_compiler) || { \
	  echo "installing a C compiler, since there is none (the ziglang package, 440 MB) ..."; \
	  ($(call pip_install,.[compiler])) >/dev/null || \
	  echo "warning: it could not be installed (see $(VENV)/install.log):" \
	    "without a C compiler a CPU is half as fast"; }
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need ..."
	@$(call pip_install,.[test])
	@touch $@
