# make run       set up, train the quickstart through the service, write runs/quickstart/
# make serve     set up, keep a service on 127.0.0.1 with its state in .thinwire/
# make test      set up, run the checks and the tests; make test-all adds the slow ones and more random examples
# make test-fast set up, run a case of each law, until the first that fails: less than a minute
# make check     formatting, lint, types, import rules, spelling
# make bench-gpu on a machine with an NVIDIA GPU: what only a GPU can show, in ten minutes (ARGS="--minutes 20"); then
#                steps of ranks as hosts, in ten more, which need root and iproute2 (HOSTS_ARGS="--minutes 5")
# make release   build and check what a tag names, into dist/VERSION (VERSION=0.2.0); make version writes the version
# make site      the documents and a reference, searchable, in build/site/index.html
# make manifests render deploy/chart with its own values into deploy/manifests/

PYTHON ?= python3
BIN := .venv/bin
THINWIRE_HOME ?= $(CURDIR)/.thinwire
PYTEST := $(BIN)/python -m pytest --durations=25
# A process that stands still with the interpreter in its hands hears no limit of time. It is ended, and names the test.
THAWED := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
# CI gives --no-compile here: of 26,000 files its tests import some, and .venv/.collected compiles these.
PIP_ARGS ?=
INSTALL := $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
# Of what pip says: each download with its size, and when it begins to unpack, which is minutes without a word.
SHOWN := sed -un -e 's/^ *Downloading \([^ ]*\) \((.*)\)/  downloading \1 \2/p' \
	-e 's/^Installing collected packages:.*/  unpacking: a minute or two .../p'
# A pipe fails where pip does.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# Where tests with the mark `law` are: to collect all others takes longer than to run these.
LAWS := tests/comm tests/optim tests/emulation tests/test_architecture.py tests/test_docs.py
# Where those of the one Ray are.
RAYS := tests/tools/doctor tests/e2e tests/kubeapi/test_real_job.py tests/service/test_launch_local.py tests/tools/drill tests/workers/elastic
# Where the libraries are imported that take longest, which one process does once: tests/integrations/loaded.py.
LIBRARIES := tests/integrations tests/test_examples.py
TEST_JOBS ?= 3
# Those of the one Ray and those of libraries run one at a time; all others run side by side.
SIDE_BY_SIDE := -n $(TEST_JOBS) --dist worksteal $(addprefix --ignore=,$(LIBRARIES))

# Where it is set, every process that a test starts compiles all sources that it imports, and each of five that collect
# tests rewrites all of them.
export PYTHONDONTWRITEBYTECODE :=
# Tests run side by side, and so do the ranks of each: threads below them wait for each other with both cores busy.
test test-fast test-all: export OMP_NUM_THREADS := 1

.PHONY: run serve test test-fast test-all check bench-gpu manifests version release site clean

run: .venv/.worker
	@THINWIRE_HOME="$(THINWIRE_HOME)" $(BIN)/thinwire quickstart

serve: .venv/.worker
	@THINWIRE_HOME="$(THINWIRE_HOME)" $(BIN)/thinwire serve

test: .venv/.dev
	@$(MAKE) --no-print-directory -j 2 check .venv/.loops .venv/.collected
	@# All at once; the output of the first two comes at the end. A shell has what runs in its background ignore
	@# SIGINT, which tests send to what they start.
	@log=$$(mktemp -d); \
	env --default-signal=INT $(PYTEST) $(THAWED) -m "not ray and not slow and not gpu" $(LIBRARIES) > $$log/1 2>&1 & first=$$!; \
	env --default-signal=INT $(PYTEST) $(THAWED) -m "not ray and not slow and not gpu" $(SIDE_BY_SIDE) > $$log/2 2>&1 & beside=$$!; \
	trap 'kill $$first $$beside' INT TERM; \
	$(PYTEST) $(THAWED) -m "ray and not slow and not gpu" $(RAYS); of_ray=$$?; \
	wait $$first; of_libraries=$$?; wait $$beside; others=$$?; cat $$log/1 $$log/2; rm -rf $$log; \
	[ $$of_libraries = 0 ] && [ $$others = 0 ] && [ $$of_ray = 0 ]

test-fast: .venv/.dev .venv/.loops
	$(BIN)/python -m pytest -q --exitfirst -m "law and not ray and not slow and not gpu" --most-cases 1 -n 2 --dist worksteal $(LAWS)

# The site's packages too, for its tests.
test-all: .venv/.dev .venv/.site
	@$(MAKE) --no-print-directory -j 2 check .venv/.loops .venv/.collected
	$(PYTEST) -m "not ray and not gpu" --hypothesis-profile=thorough $(LIBRARIES)
	$(PYTEST) -m "not ray and not gpu" --hypothesis-profile=thorough $(SIDE_BY_SIDE)
	$(PYTEST) -m "ray and not gpu" --hypothesis-profile=thorough $(RAYS)

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

# With what is installed: neither Ray nor the service is needed there.
bench-gpu:
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(ARGS); first=$$?; \
		$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu_hosts $(HOSTS_ARGS) && exit $$first

manifests: .venv/.dev
	@$(BIN)/helm template thinwire deploy/chart --namespace thinwire > deploy/manifests/thinwire.yaml

version: .venv/.dev
	@$(BIN)/python -m deploy.release "$(VERSION)" --write

release: .venv/.dev
	@$(BIN)/python -m deploy.release "$(VERSION)"

site: .venv/.site
	@$(BIN)/python docs/site/build.py build/site && echo "build/site/index.html"

.venv/.site: .venv/.dev
	@$(INSTALL) -e ".[site]" | $(SHOWN)
	@touch $@

# Compiled once, before processes that run side by side would each do it.
.venv/.loops: .venv/.dev $(wildcard comm/kernels/*.py optim/kernels/*.py)
	@echo "compiling the loops of comm/kernels and optim/kernels ..."
	@$(BIN)/python -m thinwire.optim.kernels
	@touch $@

# The same for the sources of tests and what they import, and for Ray, of which five processes start at once.
.venv/.collected: .venv/.loops
	@echo "compiling the tests and what they import ..."
	@$(BIN)/python -m compileall -qq .venv/lib/python*/site-packages/ray || true
	@$(BIN)/python -m pytest --collect-only -q -m "not slow and not gpu" > /dev/null || true
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"thinwire needs Python 3.11 or newer, $(PYTHON) is {v.major}.{v.minor}; run: make PYTHON=python3.11")'
	@$(PYTHON) -m venv .venv || { echo "could not make .venv: on Debian and Ubuntu run: apt install python3-venv" >&2; rm -rf .venv; exit 1; }
	@# The pip that Python 3.11 and 3.12 bring takes four times as long to find what goes together.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=26"
	@touch $@

.venv/.worker: .venv/.created pyproject.toml constraints.txt
	@echo "installing thinwire and its workers into .venv (torch and ray: some minutes the first time) ..."
	@$(INSTALL) -e ".[all,vision]" | $(SHOWN)
	@touch $@

.venv/.dev: .venv/.created pyproject.toml constraints.txt
	@echo "installing thinwire, its workers and the development tools into .venv ..."
	@$(INSTALL) -e ".[all,vision,dev]" | $(SHOWN)
	@touch $@ .venv/.worker
