# make demo   ask the sample PDF a question     make test   the whole test suite, from nothing
#
# Tests that take minutes each (131,072 tokens, 150 requests, needles): make test-slow
# The app in a real browser (needs a chromium): make test-browser
# All make .venv first. Another interpreter: make demo PYTHON=python3.12

PYTHON     ?= python3
VENV_FLAGS ?=
DOCUMENT   ?= examples/lighthouse.pdf
QUESTION   ?= What is the name of the harbour master?
TESTS      ?= tests
# As on a smaller CPU: make test CPU=avx2 (baseline, avx2, avx512, avx512_bf16, amx; see CONTRIBUTING.md)
CPU        ?=
# Test files at the same time; one worker keeps a whole file
JOBS       ?= 2

# The oldest supported releases are in .ci/floor.txt, except torch: old builds of it for CPUs are not to be
# had everywhere. Where pip can reach one, run make test-floor FLOOR_TORCH=2.9.0
FLOOR_TORCH ?= 2.13.0
FLOOR_TESTS ?= tests

VENV  := .venv
FLOOR := .venv-floor
PIP   := -m pip --quiet --disable-pip-version-check

.PHONY: demo test test-cpus test-browser test-slow lint format test-floor bench clean

demo: $(VENV)/.run
	$(VENV)/bin/tidekv ask "$(DOCUMENT)" "$(QUESTION)"

test: $(VENV)/.dev
	TIDEKV_CPU=$(CPU) $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not slow and not browser" $(TESTS)

# What depends most on the CPU's instructions, on the two lowest kinds that this one can work as.
NUMERICS := tests/test_attention.py tests/test_hardware.py tests/compress tests/prefill tests/engine tests/tools

test-cpus: $(VENV)/.dev
	for kind in $$($(VENV)/bin/python -c 'from tidekv_llm.hardware import cpu_kinds; print(*cpu_kinds()[:2])'); do \
	  echo "on a CPU with $$kind:"; $(MAKE) --no-print-directory test CPU=$$kind TESTS="$(NUMERICS)" || exit 1; done

test-browser: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m "browser and not slow" tests/apps

test-slow: $(VENV)/.dev
	$(VENV)/bin/python -m pytest --timeout 1200 -m slow $(TESTS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	MYPYPATH=.:apps $(VENV)/bin/mypy -p tidekv_apps
	cd integrations && MYPYPATH=.:.. ../$(VENV)/bin/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache \
	  --namespace-packages --explicit-package-bases -p tidekv_fields -p langchain_tidekv -p llama_index.llms.tidekv
	$(VENV)/bin/lint-imports --no-cache

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

test-floor: $(FLOOR)/.dev
	$(FLOOR)/bin/python -m pytest -m "not slow" $(FLOOR_TESTS)

bench: $(VENV)/.run
	$(VENV)/bin/tidekv bench headline

clean:
	rm -rf $(VENV) $(FLOOR) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp says that a step is done: a second make is quick, one that broke off goes on where it stopped.

$(VENV)/.python $(FLOOR)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "TideKV needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV_FLAGS) $(@D)
	@touch $@

$(VENV)/.torch: $(VENV)/.python .ci/install_torch.py
	$(VENV)/bin/python .ci/install_torch.py
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/python $(PIP) install -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/python $(PIP) install -e '.[dev,lint]'
	@touch $(VENV)/.run $@

$(FLOOR)/.dev: $(FLOOR)/.python pyproject.toml .ci/floor.txt .ci/install_torch.py
	$(FLOOR)/bin/python .ci/install_torch.py $(FLOOR_TORCH)
	$(FLOOR)/bin/python $(PIP) install --constraint .ci/floor.txt -e '.[dev]'
	@touch $@
