# Every target does its own set-up: a virtual environment in $(VENV) and an editable install of the package, with a
# stamp file per set of extras so that the second call starts at once. uv is used where it is on PATH, else pip.
#
#   make demo ARGS="--keep"            make test PYTEST_ARGS="-k router"
#   make test VENV=/tmp/venv           make demo PYTHON=python3.13        make demo UV=      (plain pip, even with uv)

VENV   ?= .venv
PYTHON ?=
UV     ?= $(shell command -v uv 2>/dev/null)
ARGS        ?=
PYTEST_ARGS ?=
FUZZ_ARGS   ?=
# One worker a core, and at most four. A file's tests stay together, for what they share; in the order of the files,
# whose last are short.
TEST_WORKERS ?= --numprocesses=logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder
SOAK_ARGS   ?=

BIN := $(VENV)/bin
RUN := $(BIN)/python -m

.DEFAULT_GOAL := help
.PHONY: help demo test check lint format soak fuzz docs docs-serve dev clean
.DELETE_ON_ERROR:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-core  ## three small models served from two pools on this CPU, over HTTP
	@$(BIN)/crosspool demo $(ARGS)

test: $(VENV)/.installed-test  ## the default tests: no GPU, no torch, less than ten minutes
	@$(RUN) pytest $(TEST_WORKERS) $(PYTEST_ARGS)

check: lint test  ## what CI and pre-commit check: format, lint, types, import rules, tests

lint: $(VENV)/.installed-dev
	@echo "==> ruff format"   && $(RUN) ruff format --check .
	@echo "==> ruff check"    && $(RUN) ruff check .
	@echo "==> mypy"          && $(RUN) mypy
	@echo "==> import rules"  && $(BIN)/lint-imports --no-logo

format: $(VENV)/.installed-dev  ## rewrite the sources in the house format
	@$(RUN) ruff format .
	@$(RUN) ruff check --fix .

soak: $(VENV)/.installed-test  ## long steady load; minutes to hours
	@$(RUN) pytest -m soak --timeout=0 $(SOAK_ARGS)

fuzz: $(VENV)/.installed-test  ## random operation sequences, many more of them and from fresh seeds
	@$(RUN) pytest -m fuzz --timeout=0 --hypothesis-profile=fuzz $(FUZZ_ARGS)

docs: $(VENV)/.installed-docs  ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet && echo "documentation: site/index.html"

docs-serve: $(VENV)/.installed-docs  ## serve the documentation, rebuilt as you write
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs serve

dev: $(VENV)/.installed-dev  ## install everything needed to work on the code, and the pre-commit hook
	@$(BIN)/pre-commit install

clean:  ## remove caches, builds and the virtual environment
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up ---------------------------------------------------------------------------------------------------------

# The first interpreter that runs and is new enough. A name on PATH may be a stub that cannot run, so each is tried.
# Without uv it must also be able to make a virtual environment.
NEEDS       := import sys; sys.exit(sys.version_info < (3, 11))
NEEDS_VENV  := import ensurepip, venv
define find_python
for candidate in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
  "$$candidate" -c '$(NEEDS)' >/dev/null 2>&1 || continue; \
  new_enough="$$candidate"; \
  if [ -n "$(UV)" ] || "$$candidate" -c '$(NEEDS_VENV)' >/dev/null 2>&1; then python="$$candidate"; break; fi; \
done
endef

$(VENV)/.created:
	@python=; new_enough=; $(find_python); \
	if [ -n "$(UV)" ]; then \
	  echo "==> creating $(VENV) with uv ($${python:-a Python that uv finds})"; \
	  "$(UV)" venv --quiet --allow-existing --python "$${python:->=3.11}" "$(VENV)" || exit 1; \
	elif [ -n "$$python" ]; then \
	  echo "==> creating $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv "$(VENV)" || exit 1; \
	elif [ -n "$$new_enough" ]; then \
	  echo "error: $$new_enough cannot create virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv) or uv" >&2; exit 1; \
	else \
	  echo "error: CrossPool needs Python 3.11 or newer, found $$({ $(or $(PYTHON),python3) --version; } 2>/dev/null || echo none); install one or name it: make PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	touch "$@"

# .installed-core has no extras; .installed-NAME has the extra NAME.
$(VENV)/.installed-%: pyproject.toml | $(VENV)/.created
	@extras="$(patsubst %,[%],$(filter-out core,$*))"; start=$$(date +%s); \
	echo "==> installing crosspool$$extras into $(VENV) (once)"; \
	if [ -n "$(UV)" ]; then \
	  "$(UV)" pip install --quiet --python "$(BIN)/python" --editable ".$$extras" || exit 1; \
	else \
	  $(RUN) pip install -qq --disable-pip-version-check --editable ".$$extras" || exit 1; \
	fi; \
	echo "==> installed in $$(( $$(date +%s) - start )) s"; touch "$@"
