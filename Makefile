# The two commands to know: `make demo` shows discolab at work, `make test` checks what a change may
# have broken, in ten minutes. `make test-all` leaves nothing out.
# Both make .venv on first use; nothing is installed or registered outside this folder.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

# python3.11 where it runs, else python3; or name one: make PYTHON=/path/to/python3.12
PYTHON ?= $(shell python3.11 -c '' >/dev/null 2>&1 && echo python3.11 || echo python3)

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := build/demo
DEMO_NOTEBOOKS := notebooks/01_quickstart.ipynb notebooks/02_tensor_parallel.ipynb \
  notebooks/07_seeing_shards.ipynb
# Another Python, for `make test-python`: PY=/path/to/python3.13
PY ?=
VERSION_OF_PY = version=$$("$(PY)" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || { \
  echo "error: cannot run '$(PY)'; name a Python: make $@ PY=/path/to/python3.13" >&2; exit 1; }
# IF_POSSIBLE=1: `make smoke` is content where there is no wheel, or no room
IF_POSSIBLE ?=
# More arguments for the unit tests: make test PYTEST_ARGS="-m 'not browser'"
PYTEST_ARGS ?=
# How many processes run tests at a time, but for those that need the machine for themselves
JOBS ?= 2
# More arguments for JupyterLab: make lab LAB_ARGS="--no-browser --port 9999"
LAB_ARGS ?=
# How long `make soak` uses each engine, and the seed of its first: make soak SECONDS=3600 SEED=1
# Others, as Ray: make soak ENGINES=ray
ENGINES ?= threads processes sockets
SECONDS ?= 600
SEED ?= $(shell date +%s)
# Only some of the pictures: make pictures ONLY="dref registers"
ONLY ?=

# Programs that a notebook starts, and the kernel itself, come from .venv and from nowhere else.
export PATH := $(BIN):$(PATH)
export VIRTUAL_ENV := $(VENV)
export JUPYTER_PATH := $(VENV)/share/jupyter
export JUPYTER_PREFER_ENV_PATH := 1
export PYTHONNOUSERSITE := 1
unexport PYTHONHOME
unexport PYTHONPATH

.PHONY: help demo test test-all accelerator test-python units soak test-tvm compat lab pictures docs dist smoke lint clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# The interpreter is looked up past any environment that is active, .venv itself included.
$(STAMP): pyproject.toml constraints.txt
	@version=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || { \
	  echo "error: cannot run '$(PYTHON)'; name a Python: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$(PYTHON)' is Python $$version, discolab needs 3.11 or newer;" \
	    "name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	base=$$("$(PYTHON)" -c 'import sys; print(sys._base_executable)'); \
	"$(BIN)/python" -m pip --version >/dev/null 2>&1 || { \
	  echo "making $(notdir $(VENV)) with $$base ($$version)"; \
	  rm -rf "$(VENV)"; \
	  "$$base" -m venv "$(VENV)" || { rm -rf "$(VENV)"; \
	    echo "error: '$$base' cannot make $(VENV); Debian and Ubuntu need the package python3-venv" >&2; \
	    exit 1; }; \
	}
	@echo "installing discolab and its tools into $(notdir $(VENV)) (a few minutes the first time)"
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check \
	  -e '.[test,lab,dev]' -c constraints.txt
	@touch $@

demo: $(STAMP) ## run the demo, then the first notebooks, to HTML pages in build/demo
	@"$(BIN)/python" -m discolab demo
	@mkdir -p $(DEMO)
	@for nb in $(DEMO_NOTEBOOKS); do \
	  [ -f "$$nb" ] || { echo "error: $$nb is missing" >&2; exit 1; }; \
	  echo "running $$nb"; \
	  OMP_NUM_THREADS=1 "$(BIN)/python" -m nbconvert --log-level WARN --to html --execute \
	    --ExecutePreprocessor.kernel_name=python3 \
	    --ExecutePreprocessor.timeout=300 \
	    --ExecutePreprocessor.store_widget_state=False \
	    --output-dir $(DEMO) "$$nb" 2> >(grep -v 'IPKernelApp.*over TCP' >&2); \
	done
	@echo; echo "Open in a browser:"
	@for nb in $(DEMO_NOTEBOOKS); do echo "  $(CURDIR)/$(DEMO)/$$(basename "$$nb" .ipynb).html"; done

# $(call PYTEST,ENVIRONMENT,ARGUMENTS,WHICH): pytest. With RETRY=1 it runs once more, in a new process,
# if tests failed: those that WHICH selects. One that passes then met a race or a busy machine; what
# it said the first time is printed, to be mended.
RETRY ?=
PYTEST = $(1) "$(BIN)/python" -m pytest $(2)$(if $(RETRY), || { \
  [ $$? = 1 ]; echo "=== tests failed: they run once more"; $(1) "$(BIN)/python" -m pytest $(2) $(3); })
NO_NBVAL := -p no:nbval# the import of which takes two seconds, in each process
LAST_FAILED := --last-failed --last-failed-no-failures none -rA

# Tests that may run side by side, then those that need the machine
define RUN_UNITS
$(call PYTEST,OMP_NUM_THREADS=1,$(NO_NBVAL) -n $(JOBS) --dist loadfile --part together $(1) $(PYTEST_ARGS),$(LAST_FAILED))
$(call PYTEST,,$(NO_NBVAL) --part alone $(1) $(PYTEST_ARGS),$(LAST_FAILED))
endef

# Tests on the simulated accelerator, which is built for them
define RUN_ACCELERATOR
@if command -v c++ >/dev/null && command -v ninja >/dev/null; then \
  $(call PYTEST,OMP_NUM_THREADS=1,$(NO_NBVAL) -n $(JOBS) --dist loadfile -m accelerator $(1),$(LAST_FAILED)); \
else echo "no c++ or no ninja: the simulated accelerator is left out"; fi
endef

# Those, then notebooks against stored outputs
define RUN_TESTS
$(call RUN_UNITS,$(1))
$(call RUN_ACCELERATOR,tests/accelerator)
$(call PYTEST,OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=,-p no:cacheprovider \
  -o timeout=0 -o faulthandler_timeout=0 \
  --nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg \
  --nbval-cell-timeout 120 $(2))
endef

test: lint ## lint, the tests to run often, the demo's notebooks against their stored outputs
	$(call RUN_TESTS,,$(DEMO_NOTEBOOKS))

test-all: lint docs ## lint, docs, all tests on all engines, all notebooks
	$(call RUN_TESTS,--all,notebooks/)

accelerator: $(STAMP) ## tests on the simulated accelerator, all of them (an hour): more seeds, and those for a GPU
	$(call RUN_ACCELERATOR,--all)

test-python: ## the tests that need no browser, on another Python: make test-python PY=python3.13
	@$(VERSION_OF_PY); \
	"$(MAKE)" --no-print-directory units PYTHON="$(PY)" VENV="$(CURDIR)/build/python$$version"

units: $(STAMP)
	$(call RUN_UNITS,--long -m 'not browser')

soak: $(STAMP) ## use discolab at random, SECONDS on each engine: threads, processes, sockets
	@for engine in $(ENGINES); do \
	  OMP_NUM_THREADS=1 "$(BIN)/python" -m tests.soak $$engine $(SECONDS) $(SEED); \
	done

test-tvm: $(STAMP) ## install TVM (100 MB) into .venv, then test with what it compiles
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -e '.[tvm]' -c constraints.txt
	"$(BIN)/python" -m pytest --all tests/runtime/test_tvm.py tests/loader/test_tvm.py $(PYTEST_ARGS)

compat: $(STAMP) ## install libraries that people bring (450 MB) into .venv, then test with them
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -e '.[compat]' -c constraints.txt
	"$(BIN)/python" -m pytest --all tests/compat tests/isolation/test_libraries.py $(PYTEST_ARGS)

lab: $(STAMP) ## open JupyterLab on the notebooks
	"$(BIN)/python" -m jupyterlab notebooks/ $(LAB_ARGS)

pictures: $(STAMP) ## take the pictures in docs/pictures again; needs Chromium
	"$(BIN)/python" -m tests.browser.pictures $(ONLY)

docs: $(STAMP) ## build the documentation as a site in build/docs
	@"$(BIN)/python" -c 'import mkdocs, mkdocstrings, mkdocs_jupyter' 2>/dev/null || \
	  "$(BIN)/python" -m pip install --quiet --disable-pip-version-check -e '.[docs]' -c constraints.txt
	@rm -rf build/pages && mkdir -p build/pages
	@for page in README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs notebooks benchmarks; do \
	  ln -s "$(CURDIR)/$$page" build/pages/; done
	NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --clean --quiet
	@echo "open $(CURDIR)/build/docs/index.html"

# The oldest ipykernel that is supported: what hosted notebooks have (Colab, Kaggle, SageMaker).
OLD_KERNEL := 6.29.5

dist: $(STAMP) ## build the wheel, and try it in an empty environment: engines, magics, an old kernel
	rm -rf dist build/dist
	"$(BIN)/python" -m build --outdir dist
	"$(BIN)/python" -m venv build/dist
	build/dist/bin/python -m pip install --quiet --disable-pip-version-check \
	  "$$(ls dist/*.whl)[ray,rich]" -c constraints.txt
	cp tests/packaging/smoke.py build/dist/
	cd build/dist && OMP_NUM_THREADS=1 bin/python -I smoke.py --ray
	build/dist/bin/python -m pip install --quiet --disable-pip-version-check ipykernel==$(OLD_KERNEL)
	cd build/dist && OMP_NUM_THREADS=1 bin/python -I smoke.py

smoke: ## install discolab for another Python, and try engines and magics there: make smoke PY=python3.13
	@$(VERSION_OF_PY); \
	there=build/smoke$$version; rm -rf $$there; "$(PY)" -m venv $$there; \
	echo "installing discolab into $$there (a few minutes)"; \
	$$there/bin/python -m pip install --quiet --disable-pip-version-check '.[rich]' -c constraints.txt || { \
	  echo "Python $$version: what discolab needs can not be installed here"; [ -n "$(IF_POSSIBLE)" ]; exit; }; \
	cp tests/packaging/smoke.py $$there/; cd $$there; OMP_NUM_THREADS=1 bin/python -I smoke.py

lint: $(STAMP) ## ruff and mypy
	"$(BIN)/python" -m ruff check .
	"$(BIN)/python" -m ruff format --check .
	"$(BIN)/python" -m mypy

clean: ## remove .venv and everything that was built
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name .git -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +
