# `make demo` runs a whole fleet on this machine, `make test` passes the tests; both set everything up first.
#
#   VENV       where the virtual environment lies                  (.venv)
#   PYTHON     the interpreter it is made with                      (the first one that is 3.11 or newer)
#   PIP_FLAGS  more arguments for pip; on a PC without a GPU: --extra-index-url https://download.pytorch.org/whl/cpu
#   ARGS       more arguments for the demo, for pytest, for fuzz and for mutants  (make mutants ARGS="--room journal")
#   TIMES      how often `make flaky` runs the quick tests           (20)
#
# EDGEFL_BOARDS names the folder that keeps the root file systems and wheels of emulated boards.

VENV ?= .venv
PYTHON ?=
PIP_FLAGS ?=
ARGS ?=
TIMES ?= 20

# Tests wait a good deal, for fleets of processes: one more at a time than there are cores.
WORKERS := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)

# An environment that was only half made would pass for a whole one.
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-slow test-flower test-ray mlflow-server test-track test-label-studio flaky chaos chaos-short attack soak board-test wheel-check locks sbom fuzz mutants check docs bench clean

help:
	@echo "make demo         run a whole fleet on this machine"
	@echo "make test         run the quick tests: minutes, and nothing but Python is needed"
	@echo "make test-all     run all but the slow ones, with Mosquitto, Chromium, PostgreSQL and what else is here"
	@echo "make test-slow    run the tests that take minutes each"
	@echo "make test-flower  run the tests of Flower's wire and apps with the newest Flower that edgefl admits"
	@echo "make test-ray     run the tests of the simulator on Ray clusters of several nodes on this machine (minutes)"
	@echo "make test-track   run the tests of experiment trackers with a real MLflow server"
	@echo "make test-label-studio  run the tests of labels made elsewhere with a real Label Studio (minutes)"
	@echo "make flaky        run the quick tests TIMES times; a test that fails once is a fault"
	@echo "make chaos-short  do bad things of every kind to a fleet while it trains (minutes)"
	@echo "make chaos        200 random kills over one run, the ledger, and a table of how long recoveries took (half an hour)"
	@echo "make attack       attack a fleet of real processes in every known way; prints a table of what came of it (an hour)"
	@echo "make soak         see that nothing grows in a real hour and in a simulated week (an hour and a half)"
	@echo "make board-test   boot emulated boards from blank cards, print their time lines (root, Debian; minutes)"
	@echo "make wheel-check  import every wheel of a board under the processors of old ones (root, Debian; minutes)"
	@echo "make locks        pin what boards install anew, from pyproject.toml and constraints.txt"
	@echo "make sbom         write what boards install, with licences, as CycloneDX in build/sbom"
	@echo "make fuzz         feed a million damaged inputs to each reader of bytes from outside (hours; a tally goes on)"
	@echo "make mutants      change the source a bit at a time and count the changes that tests notice (minutes to hours)"
	@echo "make check        format, lint, types, imports, dead code; insecure code, vulnerable packages, secrets in logs"
	@echo "make docs         build the documentation site; a wrong link or anchor fails"
	@echo "make bench        measure the figures that the README quotes (hours; EDGEFL_DATA says where data is)"
	@echo "make clean        remove the environment and what tools left behind"

demo: $(VENV)/.installed-demo
	$(BIN)/edgefl demo $(ARGS)

# Hundreds of processes import the same modules: these are compiled once, whatever the environment says.
test test-all test-slow flaky: export PYTHONDONTWRITEBYTECODE :=

PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
QUICK := not extended and not slow and not board and not chaos and not attack

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)" $(ARGS)

test-all: $(VENV)/.installed-dev
	@$(BIN)/python tests/requirements.py
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not board and not chaos and not attack" $(ARGS)

flaky: $(VENV)/.installed-dev
	@failed=0; for number in $$(seq $(TIMES)); do \
	    echo "== $$number of $(TIMES)"; \
	    $(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)" $(ARGS) || failed=$$((failed + 1)); \
	done; echo "$$failed of $(TIMES) runs failed"; test "$$failed" = 0

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "slow and not board and not chaos and not attack" --timeout 1800 $(ARGS)

# The newest release that edgefl admits, with the two packages that it needs newer than constraints.txt has them: in an
# environment of their own, which takes all others from the usual one.
NEWEST_FLOWER := flwr==1.42.0 certifi==2026.10.19.post1 uv==0.13.9
FLOWER_VENV := build/venv-$(subst ==,-,$(firstword $(NEWEST_FLOWER)))
SITE_PACKAGES = import sysconfig; print(sysconfig.get_path("purelib"))

$(FLOWER_VENV)/.installed: $(VENV)/.installed-dev
	$(BIN)/python -m venv --clear $(FLOWER_VENV)
	@$(BIN)/python -c '$(SITE_PACKAGES)' >$(FLOWER_VENV)/paths; echo "$(CURDIR)" >>$(FLOWER_VENV)/paths
	@mv $(FLOWER_VENV)/paths "$$($(FLOWER_VENV)/bin/python -c '$(SITE_PACKAGES)')/tested.pth"
	$(FLOWER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade $(NEWEST_FLOWER)
	@touch $@

test-flower: $(FLOWER_VENV)/.installed
	$(FLOWER_VENV)/bin/python -m pytest $(PARALLEL) -m "not slow" $(ARGS) \
	    tests/flower tests/coordinator/flower tests/device/flower

# Of 240 MB, and for nobody who trains on one machine: in an environment of its own, as above.
RAY := ray==2.60.0
RAY_VENV := build/venv-$(subst ==,-,$(RAY))

$(RAY_VENV)/.installed: $(VENV)/.installed-dev
	$(BIN)/python -m venv --clear $(RAY_VENV)
	@$(BIN)/python -c '$(SITE_PACKAGES)' >$(RAY_VENV)/paths; echo "$(CURDIR)" >>$(RAY_VENV)/paths
	@mv $(RAY_VENV)/paths "$$($(RAY_VENV)/bin/python -c '$(SITE_PACKAGES)')/tested.pth"
	$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(RAY)
	@touch $@

test-ray: $(RAY_VENV)/.installed
	$(RAY_VENV)/bin/python -m pytest -n 0 $(ARGS) tests/simulation/backends/test_ray_cluster.py

# The server asks for an older pyarrow than boards may have, so it is in an environment of its own.
MLFLOW_VENV := build/venv-mlflow-3.17.2

$(MLFLOW_VENV)/.installed: | $(VENV)/.installed-dev
	$(BIN)/python -m venv --clear $(MLFLOW_VENV)
	$(MLFLOW_VENV)/bin/python -m pip install --quiet --disable-pip-version-check mlflow==3.17.2
	@touch $@

mlflow-server: $(MLFLOW_VENV)/.installed

test-track: $(VENV)/.installed-dev $(MLFLOW_VENV)/.installed
	EDGEFL_MLFLOW=$(CURDIR)/$(MLFLOW_VENV)/bin/mlflow $(BIN)/python -m pytest -n 2 -k mlflow $(ARGS) tests/history/test_tracking.py

STUDIO_VENV := build/venv-label-studio-1.23.2

$(STUDIO_VENV)/.installed: | $(VENV)/.installed-dev
	$(BIN)/python -m venv --clear $(STUDIO_VENV)
	$(STUDIO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check label-studio==1.23.2
	@touch $@

test-label-studio: $(VENV)/.installed-dev $(STUDIO_VENV)/.installed
	EDGEFL_LABEL_STUDIO=$(CURDIR)/$(STUDIO_VENV)/bin/label-studio $(BIN)/python -m pytest -n 0 $(ARGS) \
		tests/device/collect/test_label_studio.py

chaos-short: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m chaos -s $(ARGS) tests/chaos

attack: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 0 -m attack -s --timeout 3600 $(ARGS) tests/attack

chaos: $(VENV)/.installed-dev
	PYTHONPATH=tests $(BIN)/python tests/chaos/run_chaos.py $(ARGS)

soak: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/soak.py $(ARGS)

board-test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m board -rs $(ARGS) tests/boards

wheel-check: $(VENV)/.installed-dev
	PYTHONPATH=tests $(BIN)/python tests/boards/check_wheels.py $(ARGS)

locks: $(VENV)/.installed-dev
	$(BIN)/python provisioning/locks/make_locks.py $(ARGS)

sbom: $(VENV)/.installed-dev
	$(BIN)/python tests/checks/make_sboms.py $(ARGS)

fuzz: $(VENV)/.installed-dev
	$(BIN)/python tests/fuzz/feed_readers.py $(ARGS)

# Its twenty packages are for this alone: no tested set has them.
mutants: $(VENV)/.installed-dev
	@$(PIP) 'cosmic-ray==8.7.0' 'coverage==7.17.3'
	$(BIN)/python tests/checks/mutate.py $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/vulture
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive edgefl
	$(BIN)/python tests/checks/audit_packages.py
	$(BIN)/python tests/checks/make_sboms.py
	$(BIN)/python -m pytest -n 0 tests/e2e/test_log_secrets.py

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/tools/build_site.py $(ARGS)

bench: $(VENV)/.installed-dev
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

clean:
	@test ! -e "$(VENV)/pyvenv.cfg" || rm -rf "$(VENV)"
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist demo-run
	find edgefl tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# pyvenv.cfg is older than the stamps, which say what is installed in the environment.
$(VENV)/pyvenv.cfg:
	@set -e; chosen=""; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        chosen="$$candidate"; break; \
	    fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	    echo "edgefl needs Python 3.11 or newer, found $$(python3 --version 2>&1 || echo none):" \
	        "install it, or name one with make PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	fi; \
	if ! "$$chosen" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$$chosen cannot make virtual environments: sudo apt-get install python3-venv" >&2; \
	    exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$chosen" --version)"; \
	"$$chosen" -m venv "$(VENV)"

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@echo "Installing edgefl into $(VENV)"
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@echo "Installing edgefl and its development tools into $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed-demo $@
