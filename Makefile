# make setup | detectron2 | test | test-detectron2 | test-all | gpu | test-lowest | test-newest | lock | audit | lint | docs | studies | site | demo | demo-quick | clean
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
UV := .venv-uv/bin/uv
# The name depends on LOCKED and EXTRAS, so that changing them sets up again.
READY = $(VENV)/.set-up-$(if $(LOCKED),locked,$(subst $(comma),-,$(EXTRAS)))
comma := ,
empty :=
space := $(empty) $(empty)
# What modules of a site and the shell set: with it, Python would import other packages than .venv's, or none of this folder.
unexport PYTHONPATH PYTHONHOME PYTHONPLATLIBDIR PYTHONSAFEPATH PYTHONOPTIMIZE PYTHONINSPECT
# Tests start hundreds of processes, each of which would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# Of pip's settings, those that say which packages it may take, and how it gets them. With others, it would take a package
# elsewhere for one of .venv's, or install elsewhere.
PIP_SOURCES := INDEX_URL EXTRA_INDEX_URL NO_INDEX FIND_LINKS CONSTRAINT ONLY_BINARY NO_BINARY PREFER_BINARY CONFIG_FILE \
    TRUSTED_HOST CERT CLIENT_CERT PROXY KEYRING_PROVIDER USE_FEATURE TIMEOUT DEFAULT_TIMEOUT RETRIES CACHE_DIR NO_CACHE_DIR
unexport $(filter-out $(PIP_SOURCES:%=PIP_%),$(filter PIP_%,$(.VARIABLES)))
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pip is quiet in a log, and shows its progress on a terminal.
QUIET := $(shell [ -t 2 ] || echo -q)
# Repository from which Detectron2 is built; set it to a local checkout on a machine without internet.
DETECTRON2 ?= https://github.com/facebookresearch/detectron2
DETECTRON2_COMMIT := 02b5c4e295e990042a714712c21dc79b731e8833
# Detectron2 is not on the package index. Its wheel is built once per machine, and new checkouts install it from this cache.
DETECTRON2_WHEEL := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pretrain-to-transfer/detectron2-02b5c4e2-pure/detectron2-0.6-py3-none-any.whl
# Extras of pyproject.toml; with dev,docs,export,loggers, no test is skipped because a package is missing.
EXTRAS ?= dev,docs
override EXTRAS := $(subst $(space),$(comma),$(sort $(subst $(comma),$(space),$(EXTRAS))))
# 1: the versions of requirements.lock, with which the tests passed last, instead of the newest; it has all of these extras.
LOCKED ?=
override LOCKED := $(filter-out 0 no false,$(LOCKED))
LOCKED_EXTRAS := dev,docs,export,loggers
KNOWN_EXTRAS := $(if $(LOCKED),$(subst $(comma),$(space),$(LOCKED_EXTRAS)),$(shell \
    sed -n '/^.project.optional-dependencies/,/^.tool/s/^\([a-z]*\) = .*/\1/p' pyproject.toml))
UNKNOWN_EXTRAS := $(filter-out $(KNOWN_EXTRAS),$(subst $(comma),$(space),$(EXTRAS)))
$(if $(UNKNOWN_EXTRAS),$(error EXTRAS: there is no $(UNKNOWN_EXTRAS) in $(if \
    $(LOCKED),requirements.lock (LOCKED=1),pyproject.toml); choose from $(KNOWN_EXTRAS)))
# The demo's engine: detectron2 or torchvision, each in its own run folder. If empty, the engine that the file names, in runs/demo.
ENGINE ?=
# The Python of .venv: the one that is named, or the first of these that runs and is new enough. A version manager may list
# names that do not run.
SETUP_PYTHON = $(PYTHON)
PYTHONS := python3.11 python3.12 python3.13 python3
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
# python -m venv writes bin/activate last: without it, the creation was interrupted, or another make is at it.
IS_UNFINISHED := [ -e $(VENV)/pyvenv.cfg -a ! -e $(BIN)/activate ]
HAS_PIP := { ! $(IS_UNFINISHED) && $(BIN)/python -I -c 'import pip' 2>/dev/null; }
# Lets one make at a time create or change .venv, where flock works; the lock ends with the shell.
LOCK := exec 9<Makefile; flock -n -E 75 9 2>/dev/null || [ $$? -ne 75 ] || { \
    echo "waiting for another make setup in this folder" >&2; flock 9; }
# Not empty if there is a .venv whose Python does not run or has no pip, or whose creation was interrupted.
IS_BROKEN := $(shell [ ! -e $(VENV) ] || $(HAS_PIP) || echo broken)
# Prints a Python's version and installation, by which two are told apart.
IDENTIFY := import os, sys; print("Python", sys.version.split()[0], "of", os.path.realpath(sys.base_prefix))
# One thread per process: tests start several processes, and tiny tensors gain nothing from more threads, which on a busy
# machine wait for one another.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Two stages at the same time, each one process on one thread, with one GPU where there are GPUs: the numbers do not depend on
# how many cores or GPUs a machine has.
SIDE_BY_SIDE := --cluster local --parallel 2 --tasks 1 --cpus-per-task 1
# A worker runs tests in their order, which share fixtures; one that has none left takes half of another's. Tests mostly wait, so
# three workers pay off even on two cores. The slow tests on a SLURM cluster run alone, because they wait for real time limits.
IN_PARALLEL := -n 3 --dist worksteal

.PHONY: help setup check-python detectron2 test test-detectron2 test-all gpu test-lowest test-newest lock audit lint docs studies site demo demo-quick clean

help:
	@echo "To use it:"
	@echo "  make demo-quick  every stage, from images to a report, in about 2 minutes on 2 cores; its numbers mean nothing"
	@echo "  make demo        the same with enough training to compare, in about 20 minutes on 2 cores; a second run redoes"
	@echo "                   nothing; ENGINE=detectron2: Mask R-CNN with Detectron2, in runs/demo_detectron2"
	@echo "  make setup       .venv with everything except Detectron2 (with it, if this machine has built it before);"
	@echo "                   LOCKED=1: the exact versions of requirements.lock"
	@echo "  make detectron2  builds Detectron2 once per machine and installs it; DETECTRON2=/a/checkout without internet"
	@echo "  make gpu         on a machine with a GPU: its tests, then speed and memory, in nine minutes; without a setup:"
	@echo "                   PYTHON=python3 make gpu runs in an environment that has the packages; OUTPUT=FILE; without a"
	@echo "                   GPU, tiny models on a simulated one"
	@echo "  make site        the documentation as a site, in build/site"
	@echo "  make clean       removes .venv and caches; run folders and data stay"
	@echo
	@echo "To develop it:"
	@echo "  make test        the ordinary tests, in 5 minutes on 2 cores"
	@echo "  make test-detectron2  the ordinary tests that need Detectron2, and no others"
	@echo "  make test-all    the slow ones, too (real preemption on a SLURM cluster, ...)"
	@echo "  make test-lowest the ordinary tests with the lowest versions that pyproject.toml allows"
	@echo "  make test-newest the same with the newest; PYTHON=python3.13: of that Python"
	@echo "  make lint        ruff and pyright"
	@echo "  make docs        the pages that come from recipes, code, published rates and measurements, and the tests of what"
	@echo "                   the documentation says: its commands, snippets, links and names"
	@echo "  make studies     the tables of studies/ from their scores, and their figures, in build/studies"
	@echo "  make lock        regenerates requirements.lock: the newest versions with their hashes"
	@echo "  make audit       known vulnerabilities of the versions in requirements.lock"

setup: $(READY)

.FORCE:

# A .venv that runs is used or refused, and a Python that is named is tried even where .venv exists.
check-python:
	@$(LOCK); \
	python="$$($(BIN)/python -I -c '$(IDENTIFY)' 2>/dev/null)" || python=; \
	[ -z "$$python" ] || $(BIN)/python -I -c '$(IS_NEW_ENOUGH)' || { \
	    echo "error: $(VENV) has $$python, which is older than Python 3.11; run make clean first" >&2; exit 2; }; \
	[ -z "$$python" ] || $(IS_UNFINISHED) || ( set +u; . $(BIN)/activate && [ "$$VIRTUAL_ENV" -ef $(VENV) ] ) 2>/dev/null || { \
	    echo "error: activating $(VENV) does not lead to it: it was moved or copied here; run make clean first" >&2; exit 2; }; \
	[ -n "$(SETUP_PYTHON)" ] || exit 0; \
	"$(SETUP_PYTHON)" -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { \
	    echo "error: PYTHON=$(SETUP_PYTHON) does not run or is older than Python 3.11; name another, or none" >&2; exit 2; }; \
	[ -z "$$python" ] || [ "$$python" = "$$("$(SETUP_PYTHON)" -c '$(IDENTIFY)')" ] || { \
	    echo "error: $(VENV) has $$python, not PYTHON=$(SETUP_PYTHON); run make clean first, or omit PYTHON" >&2; exit 2; }

# The stamp is written last, so that an interrupted setup is repeated. A .venv without pip gets it; one whose Python is gone is
# created again.
$(READY): pyproject.toml requirements.lock $(if $(IS_BROKEN),.FORCE) | check-python
	@$(LOCK); found="$(SETUP_PYTHON)"; \
	[ -n "$$found" ] || for python in $(PYTHONS); do \
	    if "$$python" -c '$(IS_NEW_ENOUGH)' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "error: no Python 3.11 or newer was found ($$(python3 --version 2>&1)); install one, or name it:" \
	        "make setup PYTHON=/path/to/python3.11" >&2; exit 2; \
	fi; \
	$(HAS_PIP) || { $(BIN)/python -I -m ensurepip >/dev/null 2>&1 && $(HAS_PIP); } || { \
	    [ -e $(VENV)/pyvenv.cfg ] || rmdir $(VENV) 2>/dev/null || [ ! -e $(VENV) -a ! -L $(VENV) ] || { \
	        echo "error: $(VENV) is not a virtual environment; move it away, and run make setup again" >&2; exit 2; }; \
	    "$$found" -m venv --clear $(VENV); \
	} || { \
	    echo "error: $$found cannot create $(VENV) with pip, for the reason above; if that is its venv module, install it" \
	        "(Debian and Ubuntu: apt install python3-venv), or name another Python: make setup PYTHON=/path/to/python3.11" >&2; \
	    exit 2; }
	@echo "setting up $(VENV) (the first time, it downloads 3.2 GB, which takes minutes)"
	@trap 'echo "setup was stopped; make setup continues it" >&2; exit 130' INT; \
	$(LOCK); { $(if $(LOCKED),$(BIN)/python -m pip $(QUIET) install --require-hashes -r requirements.lock &&) \
	$(BIN)/python -m pip $(QUIET) install $(if $(LOCKED),--no-deps -e .,-e '.$(if $(EXTRAS),[$(EXTRAS)])') && \
	{ [ ! -e "$(DETECTRON2_WHEEL)" ] || $(BIN)/python -m pip -q install "$(DETECTRON2_WHEEL)"; } && \
	$(BIN)/python -I tools/packages.py $(if $(LOCKED),$(LOCKED_EXTRAS),$(EXTRAS)); } || { \
	    echo "error: $(VENV) is incomplete, for the reason above; check the network, the disk and pip's settings" \
	        "($(BIN)/python -m pip config list), and run make setup again" >&2; exit 2; }
	@rm -f $(VENV)/.set-up-* && touch $@
	@echo "$(VENV) is ready; before any python command: source $(BIN)/activate"

# The build imports torch; it therefore runs in this environment, with a setuptools that still has pkg_resources. It leaves
# out the C++ extension (deformable convolutions, rotated boxes), which this project does not call.
detectron2: setup
	@[ -e "$(DETECTRON2_WHEEL)" ] || { \
	    $(BIN)/python -m pip -q install 'setuptools<82' wheel; \
	    tree="$$(mktemp -d)"; trap 'rm -rf "$$tree"' EXIT; \
	    git init -q "$$tree"; \
	    git --git-dir "$$tree/.git" fetch -q --depth 1 "$(DETECTRON2)" $(DETECTRON2_COMMIT) || { \
	        echo "error: no commit $(DETECTRON2_COMMIT) at $(DETECTRON2); on a machine without internet, copy a git checkout of" \
	            "Detectron2 there and run make detectron2 DETECTRON2=/path/to/it" >&2; exit 2; }; \
	    git -C "$$tree" checkout -q FETCH_HEAD; \
	    sed -i.original 's/ext_modules=get_extensions()/ext_modules=[]/' "$$tree/setup.py"; \
	    folder="$(DETECTRON2_WHEEL)"; \
	    $(BIN)/python -m pip -q wheel --no-deps --no-build-isolation --wheel-dir "$${folder%/*}" "$$tree"; \
	}
	@$(BIN)/python -m pip -q install --force-reinstall --no-deps "$(DETECTRON2_WHEEL)"
	@$(BIN)/python -m pip -q install "$(DETECTRON2_WHEEL)"
	@echo "Detectron2 is installed from $(DETECTRON2_WHEEL) (delete that file to build it again)"

test: setup
	@$(ONE_THREAD) $(BIN)/python -m pytest $(IN_PARALLEL)

test-detectron2: setup
	@$(ONE_THREAD) $(BIN)/python -m pytest -m 'detectron2 and not slow and not docs' $(IN_PARALLEL)

test-all: test
	@$(ONE_THREAD) $(BIN)/python -m pytest -m 'slow and not slurm' --timeout 1800 -o faulthandler_timeout=1830 $(IN_PARALLEL)
	@$(ONE_THREAD) $(BIN)/python -m pytest -m 'slow and slurm' --timeout 1800 -o faulthandler_timeout=1830

# A GPU may be lent for minutes: the tests get four of nine, and the measurements the others, whether or not a test failed.
# No setup: such a machine may have another environment, and no internet. Without a GPU, both run on a simulated one.
gpu: OUTPUT ?= docs/benchmarks/gpu_new.json
gpu: GPU_PYTHON = $(or $(PYTHON),$(BIN)/python)
gpu: export PYTHONPATH := $(PYTHONPATH)
gpu:
	@status=0; SECONDS=0; limit=240; benchmark="tools/benchmark.py gpu --output $(OUTPUT)"; \
	$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	    { limit=3600; benchmark="-m tests.simulated_device tools/benchmark.py gpu --small"; }; \
	timeout --signal INT --kill-after 20 $$limit $(GPU_PYTHON) -m pytest -m 'gpu and not slow' tests/gpu || status=$$?; \
	$(GPU_PYTHON) $$benchmark --seconds $$((300 + limit - SECONDS)) || status=$$?; \
	exit $$status

# In a separate environment: `.venv` keeps the versions of the lock file.
$(UV): | setup
	@$(BIN)/python -m venv .venv-uv
	@.venv-uv/bin/python -m pip -q install 'uv>=0.5'

# The lowest or newest version of every dependency that pyproject.toml allows, in its own environment, without Detectron2.
test-lowest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-lowest test-newest: SETUP_PYTHON :=
test-lowest test-newest: test-%: setup $(UV)
	@$(UV) venv -q --clear --python $(or $(PYTHON),$(BIN)/python) .venv-$*
	@$(UV) pip install -q --python .venv-$*/bin/python --resolution $(RESOLUTION) -e '.[dev]'
	@$(ONE_THREAD) .venv-$*/bin/python -m pytest $(IN_PARALLEL)

# The newest versions, with the hashes of their files, for Python 3.11 on x86-64.
lock: setup $(UV)
	@$(UV) pip compile -q --upgrade pyproject.toml $(patsubst %,--extra %,$(subst $(comma), ,$(LOCKED_EXTRAS))) --generate-hashes \
	    --python-version 3.11.5 --python-platform x86_64-manylinux_2_28 --no-annotate --no-emit-index-url \
	    --custom-compile-command 'make lock' -o requirements.lock

# --strict: a package that cannot be looked up is an error, too.
audit: setup
	@$(BIN)/python -m pip -q install 'pip-audit>=2.7'
	@$(BIN)/pip-audit --strict --disable-pip -r requirements.lock

lint: setup
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/pyright || status=1; \
	exit $$status

docs: setup
	@$(BIN)/python -m docs.recipes
	@$(BIN)/python -m docs.costs
	@$(BIN)/python -m docs.citing
	@$(BIN)/python -m docs.reference
	@$(BIN)/python -m benchmarks.page
	@$(ONE_THREAD) $(BIN)/python -m pytest -m docs $(IN_PARALLEL)

studies: setup
	@$(BIN)/python -m studies.tools.record

site: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

demo: setup
	@$(BIN)/python tools/launch.py pipeline configs/examples/demo.yaml $(SIDE_BY_SIDE) $(if $(ENGINE),--engine $(ENGINE) --output runs/demo_$(ENGINE))

demo-quick: setup
	@$(BIN)/python tools/launch.py pipeline configs/examples/demo_quick.yaml $(SIDE_BY_SIDE)
	@echo "Every stage works. The scores mean nothing after so little training; make demo trains enough for them to differ."

clean:
	rm -rf $(VENV) .venv-uv .venv-lowest .venv-newest build .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
