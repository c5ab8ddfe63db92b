# portranger: everything a clone needs, from a bare Debian 12 or 13 on.
#
# `make demo` and `make test` each work alone: they install what is missing (Debian packages when
# run as root, and a private Python environment in .venv), and touch nothing that is there.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# python-iptables is built from source.
PYTHON_PACKAGES := python3 python3-venv python3-dev gcc libc6-dev
RUNTIME_PACKAGES := $(PYTHON_PACKAGES) libnftables1 iproute2
TEST_PACKAGES := $(RUNTIME_PACKAGES) nftables conntrack iptables

# The tests that need neither root nor a kernel, and so decide on the coverage of rules/.
PURE_TESTS = $(wildcard tests/unit tests/property tests/golden)

# nft, ip and ldconfig are in sbin, which an ordinary user of Debian does not have in PATH.
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

##@ Use it

.PHONY: demo
demo: packages-runtime venv ## build namespaces, forward port ranges, prove it with packets, clean up
	@$(BIN)/portranger demo

.PHONY: test
test: packages-test venv ## run every test; what cannot run here is listed with its reason
	@$(BIN)/python -m pytest -ra $(ARGS)

.PHONY: bench
bench: packages-test venv ## measure, against nft run as a process
	@$(BIN)/python -m bench $(ARGS)

##@ Change it

.PHONY: check
check: check-format check-lint check-types check-imports check-coverage ## everything that needs no root: format, lint, types, imports, coverage

.PHONY: check-format
check-format: venv
	@$(BIN)/ruff format --check .

.PHONY: check-lint
check-lint: venv
	@$(BIN)/ruff check .

.PHONY: check-types
check-types: venv
	@$(BIN)/mypy

.PHONY: check-imports
check-imports: venv
	@$(BIN)/lint-imports --no-cache

# A data file of its own: two runs at once must not write into each other's.
.PHONY: check-coverage
check-coverage: venv
	@export COVERAGE_FILE=.coverage.$$$$
	trap 'rm -f "$$COVERAGE_FILE"' EXIT
	$(BIN)/coverage run -m pytest -q $(PURE_TESTS)
	$(BIN)/coverage report

.PHONY: format
format: venv ## put the code in its shape, and mend what ruff can mend
	@$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: kube-assets
kube-assets: ## fetch what the Kubernetes tests need
	@echo "kube-assets: nothing to fetch, this version has no Kubernetes tests"

##@ Set it up

.PHONY: venv
venv: packages-python ## make or renew .venv; does nothing, and needs no network, when it is current
	@($(renew_venv))
	# Where Python may not write bytecode by itself, every start would compile us anew.
	$(BIN)/python -m compileall -q agent rules

.PHONY: lock
lock: packages-python ## write the newest versions of all dependencies into constraints.txt
	@$(write_constraints)

.PHONY: clean
clean: ## remove .venv and everything generated
	@rm -rf $(VENV) build dist *.egg-info .coverage .coverage.* .hypothesis .import_linter_cache \
	    .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## print this
	@awk 'BEGIN { FS = ":.*## " }
	    /^##@ / { printf "\n%s\n", substr($$0, 5) }
	    /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# ------------------------------------------------------------------------------ Debian packages

.PHONY: packages-python packages-runtime packages-test
packages-python: PACKAGES := $(PYTHON_PACKAGES)
packages-runtime: PACKAGES := $(RUNTIME_PACKAGES)
packages-test: PACKAGES := $(TEST_PACKAGES)
packages-python packages-runtime packages-test:
	@$(install_packages)

# A package is missing when what we use of it is: a Python or an nft from elsewhere serves as well.
define install_packages
present() {
    case $$1 in
        python3) command -v $(PYTHON) ;;
        python3-venv) $(PYTHON) -c 'import ensurepip, venv' ;;
        python3-dev) $(PYTHON) -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("include"), "Python.h").stat()' ;;
        libc6-dev) echo '#include <stdio.h>' | gcc -E - ;;
        libnftables1) grep libnftables.so.1 <<<"$$(ldconfig -p)" ;;
        iproute2) command -v ip ;;
        nftables) command -v nft ;;
        *) command -v "$$1" ;;
    esac >/dev/null 2>&1
}
find_missing() {
    missing=()
    for package in $(PACKAGES); do
        present "$$package" || missing+=("$$package")
    done
}
find_missing
if ((! $${#missing[@]})); then exit; fi
if ((EUID)) || ! command -v apt-get >/dev/null; then
    echo "make: missing on this machine: $${missing[*]}" >&2
    echo "make: as root on Debian: apt-get install $${missing[*]}" >&2
    exit 1
fi
# apt-get waits for the lock of dpkg but not for that of the package lists, so two of us take turns.
exec 9</var/lib/dpkg
flock 9
find_missing
if ((! $${#missing[@]})); then exit; fi
echo "make: installing with apt-get: $${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$${missing[@]}" \
    </dev/null >/dev/null
find_missing
if (($${#missing[@]})); then
    echo "make: still missing after the installation: $${missing[*]}" >&2
    exit 1
fi
endef

# ------------------------------------------------------------------------- the Python environment

# .venv is current when both marks in it say what they would say now. Its dependencies are built
# anew when the pins change, or when the clone has moved (scripts hold absolute paths); when only
# pyproject.toml changed, the project is installed again beside a running command.
define renew_venv
pins() { { pwd; cat constraints.txt; } | sha256sum; }
project() { sha256sum <pyproject.toml; }
says() { [[ -r $$1 && $$(<"$$1") == "$$2" ]]; }
runs() { $(BIN)/python -c '' 2>/dev/null; }
built() { runs && says $(VENV)/.pins "$$(pins)"; }
current() { built && says $(VENV)/.project "$$(project)"; }
if current; then exit; fi
# The lock is on the directory itself: nothing to create, to ignore or to clean up.
exec 9<.
flock 9
if current; then exit; fi
if ! built; then
    if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "make: portranger needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1)" >&2
        echo "make: name another one: make PYTHON=/path/to/python3" >&2
        exit 1
    fi
    echo "make: building $(VENV) with $$($(PYTHON) -V)"
    rm -rf $(VENV)
    $(PYTHON) -m venv $(VENV)
    $(BIN)/python -m pip install -q -c constraints.txt --upgrade pip setuptools
fi
echo "make: installing portranger and its dependencies into $(VENV)"
rm -f $(VENV)/.project
# setuptools is there already, pinned: an isolated build would download its own.
$(BIN)/python -m pip install -q --no-build-isolation -c constraints.txt -e '.[dev,iptables]'
# pip-nftables drops an __init__.py into site-packages itself, which makes tools take the whole
# directory for one package.
rm -f $(VENV)/lib/python3*/site-packages/__init__.py
pins >$(VENV)/.pins
project >$(VENV)/.project
endef

define write_constraints
scratch=$$(mktemp -d)
trap 'rm -rf "$$scratch"' EXIT
$(PYTHON) -m venv "$$scratch/venv"
"$$scratch/venv/bin/python" -m pip install -q --upgrade pip setuptools
"$$scratch/venv/bin/python" -m pip install -q --no-build-isolation -e '.[dev,iptables]'
{
    sed -n '/^#/p' constraints.txt
    "$$scratch/venv/bin/python" -m pip freeze --all --exclude-editable
} >"$$scratch/constraints.txt"
cp "$$scratch/constraints.txt" constraints.txt
echo "make: wrote constraints.txt"
endef
