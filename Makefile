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
TEST_PACKAGES := $(RUNTIME_PACKAGES) nftables conntrack iptables debootstrap systemd-container podman openssl curl python3-pyftpdlib

# Where `make install` puts things. DESTDIR comes before every path, and no installed file names it.
PREFIX ?= /usr/local
DESTDIR ?=
# Of the directories that systemd reads: see systemd.unit(5) and tmpfiles.d(5).
UNIT_DIR := $(if $(filter /usr /usr/local,$(PREFIX)),$(PREFIX)/lib/systemd/system,/etc/systemd/system)
TMPFILES_DIR := $(if $(filter /usr /usr/local,$(PREFIX)),$(PREFIX)/lib/tmpfiles.d,/etc/tmpfiles.d)

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
bench: packages-test venv ## measure, against nft run as a process; ARGS=--write renews docs/bench
	@$(BIN)/python -m bench $(ARGS)

.PHONY: bench-quick
bench-quick: packages-test venv ## the ratios that matter, in a minute, with room for noise
	@$(BIN)/python -m bench quick

.PHONY: bench-peers
bench-peers: packages-test venv packages-peers ## measure, against what others would use for the same job
	@$(BIN)/python -m bench.peers $(ARGS)

##@ Run it as a service

.PHONY: install
install: packages-runtime ## install the command, its unit, manual and configuration (PREFIX=/usr/local, DESTDIR=)
	@$(installation)
	$(install)

.PHONY: uninstall
uninstall: ## remove what install put there; what was edited, and the rules, stay
	@$(installation)
	$(uninstall)

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
	EXAMPLES=20 $(BIN)/coverage run -m pytest -q $(PURE_TESTS)
	$(BIN)/coverage report

.PHONY: format
format: venv ## put the code in its shape, and mend what ruff can mend
	@$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: kube-assets
kube-assets: packages-test venv ## build the API server that tests need, once: minutes, and Go; or set KUBEBUILDER_ASSETS
	@$(BIN)/python -m tests.kubernetes.assets

##@ Set it up

.PHONY: venv
venv: packages-python ## make or renew .venv; does nothing, and needs no network, when it is current
	@($(renew_venv))
	# Where Python may not write bytecode by itself, every start would compile us anew.
	$(BIN)/python -m compileall -q agent rules

.PHONY: test-tree
test-tree: packages-test venv ## make the Debian that tests boot, which else they make themselves
	@$(BIN)/python -m tests.systemd.trees

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

# A peer that cannot be installed is named, and the others are measured. Where systemd runs, firewalld
# would be started on this very machine with its installation, so that is left to whoever wants it.
PEER_PACKAGES := netavark containernetworking-plugins crun podman passt dbus python3-dbus $(if $(wildcard /run/systemd/system),,firewalld)
.PHONY: packages-peers $(PEER_PACKAGES:%=package-%)
packages-peers: $(PEER_PACKAGES:%=package-%)
package-%: PACKAGES = $*
$(PEER_PACKAGES:%=package-%): package-%:
	-@$(install_packages)

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
        systemd-container) command -v systemd-nspawn ;;
        netavark) command -v netavark || test -x /usr/lib/podman/netavark ;;
        containernetworking-plugins) test -x /usr/lib/cni/portmap ;;
        passt) command -v pasta ;;
        python3-pyftpdlib) /usr/bin/python3 -c 'import pyftpdlib' ;;
        dbus) command -v dbus-daemon ;;
        python3-dbus) /usr/bin/python3 -c 'import dbus' ;;
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

# ----------------------------------------------------------------------------------- installation

# Every path in one place, for install and uninstall alike.
define installation
umask 022
prefix='$(PREFIX)' root='$(DESTDIR)'
if [[ $$prefix != /* ]]; then
    echo "make: PREFIX must be an absolute path, and is $$prefix" >&2
    exit 1
fi
if [[ $$root ]]; then root=$$(realpath -m -- "$$root"); fi
environment=$$prefix/lib/portranger
command=$$prefix/bin/portranger
plugin=$$prefix/bin/kubectl-portranger
unit=$(UNIT_DIR)/portranger.service
restart=$$unit.d/10-restart.conf
tmpfiles=$(TMPFILES_DIR)/portranger.conf
manual=$$prefix/share/man/man8/portranger.8
declare -A completions=(
    [bash]=$$prefix/share/bash-completion/completions/portranger
    [zsh]=$$prefix/share/zsh/site-functions/_portranger
    [fish]=$$prefix/share/fish/vendor_completions.d/portranger.fish
)
# A configuration that differs from what was shipped was edited, and belongs to whoever did that.
shipped=$$prefix/share/portranger/portranger.toml
configuration=/etc/portranger/portranger.toml
manifests=/etc/portranger/manifests.d
state=/var/lib/portranger
files=("$$command" "$$plugin" "$$unit" "$$restart" "$$tmpfiles" "$$manual" "$${completions[@]}" "$$shipped")
edited() { [[ -e $$root$$configuration ]] && ! cmp -s "$$root$$shipped" "$$root$$configuration"; }
here() { [[ ! $$root && -d /run/systemd/system ]]; }
take_turns() { exec 9<"$$root$$prefix/lib"; flock 9; }
endef

# The environment is built beside the one in use and takes its place when it is complete. Its scripts
# and its bytecode name the place where it will be, not the one where it was built. Where the pins
# are the same it begins as a copy, and no network is needed.
define install
base=$$($(PYTHON) -c 'import os, sys; print(os.path.realpath(sys.base_prefix))')
for path in "$$environment" "$$base"; do
    case $$path/ in /home/* | /root/* | /run/user/*)
        echo "make: the service sees no home directories, and $$path is in one" >&2
        echo "make: name other places: make install PREFIX=/usr/local PYTHON=/usr/bin/python3" >&2
        exit 1 ;;
    esac
done
mkdir -p "$$root$$prefix/lib"
take_turns
export PYTHONDONTWRITEBYTECODE=1
staging=$$root$$environment.new
scratch=$$(mktemp -d)
trap 'rm -rf "$$scratch" "$$staging"' EXIT
pins() { { $(PYTHON) -VV; cat constraints.txt; } | sha256sum; }
pip() { "$$staging/bin/python" -m pip "$$@" -q --no-compile --root-user-action=ignore; }
build_environment() {
    echo "make: building $$environment with $$($(PYTHON) -V)"
    rm -rf "$$staging"
    if [[ -r $$root$$environment/.pins && $$(<"$$root$$environment/.pins") == "$$(pins)" ]]; then
        cp -a "$$root$$environment" "$$staging"
    else
        $(PYTHON) -m venv "$$staging"
        pip install -c constraints.txt --upgrade pip setuptools
    fi
    # From a copy: a build leaves its traces where the sources are.
    cp -r agent rules pyproject.toml README.md LICENSE "$$scratch"
    pip install -c constraints.txt --no-build-isolation "$$scratch[iptables]"
    rm -f "$$staging"/lib/python3*/site-packages/__init__.py "$$staging"/bin/[Aa]ctivate*
    grep -rlIZ -- "$$staging" "$$staging/bin" "$$staging/pyvenv.cfg" |
        xargs -0r sed -i "s|$$staging|$$environment|g"
    # The service may write nowhere: what is not compiled now would be compiled at every start. And
    # what is compiled earlier, by being run, names the wrong place.
    "$$staging/bin/python" -m compileall -q -j0 -s "$$staging" -p "$$environment" "$$staging/lib"
    pins >"$$staging/.pins"
}
replace_environment() {
    rm -rf "$$root$$environment.old"
    if [[ -e $$root$$environment ]]; then mv -T "$$root$$environment" "$$root$$environment.old"; fi
    mv -T "$$staging" "$$root$$environment"
    rm -rf "$$root$$environment.old"
}
put() { install -D -m 644 "$$1" "$$root$$2"; }
put_files() {
    install -d "$$root$$prefix/bin"
    ln -sfn "$$environment/bin/portranger" "$$root$$command"
    ln -sfn "$$environment/bin/kubectl-portranger" "$$root$$plugin"
    sed "s|/usr/local/bin/|$$prefix/bin/|" systemd/portranger.service >"$$scratch/unit"
    put "$$scratch/unit" "$$unit"
    if (($$(systemctl --version | sed -n '1s/^systemd \([0-9]*\).*/\1/p') >= 254)); then
        put systemd/restart.conf "$$restart"
    fi
    put systemd/tmpfiles.conf "$$tmpfiles"
    put docs/portranger.8 "$$manual"
    for shell in "$${!completions[@]}"; do
        "$$root$$environment/bin/python" -I -m agent.entry completion "$$shell" >"$$scratch/$$shell"
        put "$$scratch/$$shell" "$${completions[$$shell]}"
    done
}
put_configuration() {
    install -d "$$root$$manifests"
    if edited; then
        echo "make: kept $$configuration, which was edited; this version's is $$shipped"
    else
        put examples/portranger.toml "$$configuration"
    fi
    put examples/portranger.toml "$$shipped"
}
tell() {
    version=$$("$$root$$environment/bin/python" -I -m agent.entry --version)
    echo "make: installed $$version$${root:+ below $$root}:"
    for path in "$$environment/" "$${files[@]}" "$$configuration" "$$manifests/"; do
        if [[ -e $$root$$path || -L $$root$$path ]]; then echo "  $$path"; fi
    done
    if here && systemctl -q is-active portranger; then
        echo "make: the agent from before is still running; next: systemctl restart portranger"
    else
        echo "make: next: put manifests into $$manifests, and systemctl enable --now portranger"
    fi
}
build_environment
replace_environment
put_files
put_configuration
if here; then
    systemctl daemon-reload
    systemd-tmpfiles --create portranger.conf
fi
tell
endef

define uninstall
# Directories of a bare system stay, empty or not.
bare=("$$prefix"/{bin,lib,share,share/man} /etc /etc/systemd/system /etc/tmpfiles.d)
prune() {
    for directory in "$${bare[@]}"; do
        if [[ $$1 == "$$directory" ]]; then return; fi
    done
    if rmdir "$$root$$1" 2>/dev/null; then prune "$${1%/*}"; fi
}
remove() {
    rm -rf "$$root$$1"
    prune "$${1%/*}"
}
if [[ -d $$root$$prefix/lib ]]; then take_turns; fi
if here && [[ -e $$unit ]]; then systemctl -q disable --now portranger.service; fi
if ! edited; then rm -f "$$root$$configuration"; fi
for path in "$${files[@]}" "$$environment"; do remove "$$path"; done
prune "$$manifests"
prune "$${configuration%/*}"
if here; then systemctl daemon-reload; fi
echo "make: removed portranger$${root:+ below $$root}"
for path in "$$configuration" "$$manifests" "$$state"; do
    if [[ -e $$root$$path ]]; then echo "make: kept $$path"; fi
done
if [[ ! $$root ]]; then
    echo "make: rules that are live go on forwarding until the machine restarts, or until"
    echo "make:   make venv && $(BIN)/portranger clear"
fi
endef
