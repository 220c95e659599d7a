# Each target sets up what it needs in .venv. Python: `make PYTHON=python3.12 test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(wildcard src/redislock_fast/_pipe/*.pyx src/redislock_fast/_pipe/*.pxd)

AS_ROOT = $(shell [ "$$(id -u)" = 0 ] || echo sudo)
APT_INSTALL = $(AS_ROOT) apt-get update -qq && $(AS_ROOT) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq

# Tests that may run in many threads at once, on the same objects: the others have the server to themselves.
IN_PARALLEL := --parallel-threads=16 tests/integration/lock/test_parallel.py tests/unit/protocol/test_commands.py \
	tests/unit/util/test_tokens.py tests/pipe/test_encoding.py

# Many tests wait for a lease to end: with three at a time, half of two cores is idle. A file stays together, for the servers
# that it starts.
AT_A_TIME := -n 4 --dist loadfile

# Only the pipes differ between the implementations, and tests/pipe runs on both pipes whichever is chosen. So the twin is
# tested by what redis-py's locks do, too, and in test-all by whatever uses a pipe.
PARITY := tests/compat/test_parity.py tests/compat/test_asyncio_parity.py -k "not redis-py"
USES_A_PIPE := tests/compat tests/integration
ON_CORE := REDISLOCK_FAST_IMPLEMENTATION=compiled $(BIN)/python -m pytest -q
ON_TWIN := REDISLOCK_FAST_IMPLEMENTATION=python $(BIN)/python -m pytest -q

.PHONY: help bench alternatives test test-all test-versions compat simulate planted coverage lint format wheel clean

help:
	@echo "make bench        locks taken, released and waited for on a real server, beside redis-py"
	@echo "make alternatives the same lock in PostgreSQL and etcd, which it installs (Debian; root or sudo)"
	@echo "make test         in 3 minutes: the compiled core on Valkey and asyncio, its pure-Python twin in short"
	@echo "make test-all     make test, and the rest: every kind of server, uvloop, slow tests, the twin, long simulations"
	@echo "make test-versions the suite on every interpreter at hand, 3.10 to 3.14"
	@echo "make compat       other projects' tests of their locks, on redis-py's and on ours; network; ten minutes"
	@echo "make simulate     100,000 stories of waiters and of holders, 50,000 of keys that linger (make test-all: 36,000)"
	@echo "make planted      plants each fault of tests/planted in a copy, and shows the test that finds it; five minutes"
	@echo "make coverage     branch coverage of the Python layer (>= 95 %), line coverage of the core under the GIL"
	@echo "make lint         ruff, mypy --strict, pyright, import-linter, cython-lint"
	@echo "make format       ruff format"
	@echo "make wheel        build a wheel, install it into a clean environment, run the tests of make test against it"
	@echo "make clean        remove whatever the other targets made"

# pip 25.1 brought dependency groups.
$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install -q --disable-pip-version-check --group dev
	REDISLOCK_FAST_IMPLEMENTATION=compiled $(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -e .
	touch $@

bench: $(VENV)/installed
	$(BIN)/python -m bench throughput --mode main
	$(BIN)/python -m bench latency --rtt 1 --callers 8 --kinds threads
	$(BIN)/python -m bench contention --preset short

# Only what is missing. Debian starts the services that it installs: the bench does not use them, it starts its own.
alternatives: $(VENV)/installed
	ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || { $(APT_INSTALL) postgresql; }
	command -v etcd >/dev/null || { $(APT_INSTALL) etcd-server; }
	$(BIN)/python -m bench alternatives

test: $(VENV)/installed
	$(ON_CORE) $(AT_A_TIME)
	$(ON_CORE) $(IN_PARALLEL)
	$(ON_TWIN) $(PARITY)

# What `test` has just run is not run again.
test-all: test
	$(ON_CORE) --rest $(AT_A_TIME)
	$(ON_TWIN) $(AT_A_TIME) $(USES_A_PIPE)
	$(ON_TWIN) --all $(IN_PARALLEL)

# pyenv's interpreters are on the PATH as shims only, behind which tox does not look.
test-versions: $(VENV)/installed
	PATH="$$(ls -d "$$(pyenv root 2>/dev/null)"/versions/3.1*/bin 2>/dev/null | paste -sd: -):$$PATH" \
		$(BIN)/tox run --skip-missing-interpreters

# Gets the projects and what they need from PyPI.
compat: $(VENV)/installed
	$(BIN)/python -m tests.compat.suites

simulate: $(VENV)/installed
	$(BIN)/python -m tests.simulation.waiting --seeds 100000 --jobs 2
	$(BIN)/python -m tests.simulation.holding --seeds 100000 --jobs 2
	$(BIN)/python -m tests.simulation.lingering --seeds 50000 --jobs 2

planted: $(VENV)/installed
	$(BIN)/python -m tests.planted

# A copy, so that the slow traced core never lands beside the real one. Tracing makes Python run signal handlers between
# any two lines of the core, where the core never would, so those tests run on the twin; but not those whose handlers use
# locks, which may find the tracer's own lock taken by their thread, and hang. A traced core and subinterpreters do not go
# together at all.
coverage: $(VENV)/installed
	rm -rf build/coverage && mkdir -p build/coverage
	cp -r setup.py pyproject.toml MANIFEST.in LICENSE *.md .github src tests docs bench build/coverage
	rm -f build/coverage/src/redislock_fast/_pipe/*.so build/coverage/src/redislock_fast/_pipe/*.c
	cd build/coverage && REDISLOCK_FAST_COVERAGE=1 ../../$(BIN)/python setup.py -q build_ext --inplace
	cd build/coverage && PYTHONPATH=src COVERAGE_CORE=ctrace REDISLOCK_FAST_IMPLEMENTATION=compiled \
		../../$(BIN)/python -m coverage run -m pytest -q --all -k "not signal and not interrupt and not subinterpreter" tests
	cd build/coverage && PYTHONPATH=src COVERAGE_CORE=ctrace REDISLOCK_FAST_IMPLEMENTATION=python \
		../../$(BIN)/python -m coverage run -m pytest -q --all -k "not subinterpreter and not signal_handler" tests
	cd build/coverage && ../../$(BIN)/python -m coverage combine -q
	cd build/coverage && ../../$(BIN)/python -m coverage report --include "*.pyx"
	cd build/coverage && ../../$(BIN)/python -m coverage report --include "*.py" --fail-under 95

lint: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/cython-lint src/redislock_fast

format: $(VENV)/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(VENV)/installed
	rm -rf dist build/wheel
	REDISLOCK_FAST_IMPLEMENTATION=compiled $(BIN)/python -m build -q --outdir dist
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/python -m pip install -q --disable-pip-version-check --upgrade "pip>=25.1"
	build/wheel/bin/python -m pip install -q --disable-pip-version-check --group test dist/*.whl
	REDISLOCK_FAST_IMPLEMENTATION=compiled build/wheel/bin/pytest $(AT_A_TIME)

clean:
	rm -rf $(VENV) .tox build dist wheelhouse *.egg-info src/*.egg-info htmlcov .coverage* .benchmarks
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f src/redislock_fast/_pipe/*.c src/redislock_fast/_pipe/*.so src/redislock_fast/_pipe/*.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
