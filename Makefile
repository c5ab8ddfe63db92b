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
VM_PACKAGES := procps qemu-system-x86
TEST_PACKAGES := $(RUNTIME_PACKAGES) nftables conntrack iptables debootstrap systemd-container podman openssl curl python3-pyftpdlib chromium chromium-driver zsh fish bash-completion mandoc man-db $(VM_PACKAGES)

# Where `make install` puts things. DESTDIR comes before every path, and no installed file names it.
PREFIX ?= /usr/local
DESTDIR ?=
# Of the directories that systemd reads: see systemd.unit(5) and tmpfiles.d(5).
UNIT_DIR := $(if $(filter /usr /usr/local,$(PREFIX)),$(PREFIX)/lib/systemd/system,/etc/systemd/system)
TMPFILES_DIR := $(if $(filter /usr /usr/local,$(PREFIX)),$(PREFIX)/lib/tmpfiles.d,/etc/tmpfiles.d)
# Debian's zsh looks for those of its packages there, and nowhere else below /usr.
ZSH_DIR := $(PREFIX)/share/zsh/$(if $(filter /usr,$(PREFIX)),vendor-completions,site-functions)
# Below another prefix fish looks only where XDG_DATA_DIRS says so, which outside of desktops nobody sets.
FISH_DIR := $(if $(filter /usr,$(PREFIX)),/usr/share/fish/vendor_completions.d,/etc/fish/completions)

# A package for Debian is one for Debian's own Python, whatever else is first in PATH.
DEBIAN_PYTHON := /usr/bin/python3
# The time of everything in a release: that of the commit, or, where there is no git, a fixed one.
dist deb sbom: export SOURCE_DATE_EPOCH ?= $(or $(if $(wildcard .git),$(shell git -c safe.directory='*' log -1 --format=%ct 2>/dev/null)),1577836800)

# How many tests run at once: most of them wait, each for something of its own.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))

# The tests that need neither root nor a kernel, and so decide on the coverage of rules/.
PURE_TESTS = $(wildcard tests/unit tests/property tests/golden)

# nft, ip and ldconfig are in sbin, which an ordinary user of Debian does not have in PATH.
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

##@ Use it

.PHONY: root
root:
	@if ((EUID)); then
	    echo "make: $(MAKECMDGOALS) makes network namespaces: run it as root" >&2
	    exit 1
	fi

.PHONY: demo
demo: root packages-runtime venv ## build namespaces, forward port ranges, prove it with packets, clean up
	@$(BIN)/portranger demo

.PHONY: demo-vm
demo-vm: root packages-vm venv-dev ## the same with a real virtual machine, which qemu boots; 19 MB stay in ~/.cache/portranger
	@$(BIN)/python -m tests.vm.demo

.PHONY: test
test: packages-test package-vagrant venv-dev ## run every test; what cannot run here is listed with its reason
	@$(BIN)/python -m pytest -ra -n $(JOBS) --dist loadfile $(ARGS)

.PHONY: test-nightly
test-nightly: venv-dev ## the laws that hypothesis checks, with ten times as many examples, always others
	@EXAMPLES=$${EXAMPLES:-1000} $(BIN)/python -m pytest -q -n $(JOBS) tests/property $(ARGS)

.PHONY: test-stress
test-stress: packages-test package-vagrant venv-dev ## run every test five times, and three times beside busy loops; hours
	@$(BIN)/python -m tests.stress $(ARGS)

.PHONY: bench
bench: packages-test venv-dev ## measure, against nft run as a process; ARGS=--write renews docs/bench
	@$(BIN)/python -m bench $(ARGS)

.PHONY: bench-quick
bench-quick: packages-test venv-dev ## the ratios that matter, in a minute, with room for noise
	@$(BIN)/python -m bench quick

.PHONY: bench-peers
bench-peers: packages-test venv-dev packages-peers ## measure, against what others would use for the same job
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

##@ Release it

.PHONY: dist
dist: venv ## build the sdist and the wheel into dist/
	@$(BIN)/python -m release.dist dist
	ls dist/*.tar.gz dist/*.whl

.PHONY: deb
deb: packages-deb ## build the Debian package into dist/, for the Debian of this machine
	@$(build_package)

.PHONY: sbom
sbom: venv-dev ## write the bill of materials into dist/ (CycloneDX), and the table of licences into docs/
	@$(BIN)/python -m release.licences docs/supply-chain.md
	$(BIN)/python -m release.sbom dist/portranger.cdx.json

.PHONY: audit
audit: packages-python ## ask the network for known vulnerabilities of what is locked (pip-audit)
	@$(audit)

##@ Try it on a cluster

.PHONY: cluster
cluster: packages-cluster ## make this very machine a Kubernetes (k3s) with KubeVirt, to try things on
	@$(make_cluster)

.PHONY: deploy
deploy: packages-image ## build the image, and let the cluster of this machine run it
	@$(deploy)

##@ Change it

.PHONY: check
check: check-format check-lint check-types check-imports check-coverage ## everything that needs no root: format, lint, types, imports, coverage

.PHONY: check-format
check-format: venv-dev
	@$(BIN)/ruff format --check .

.PHONY: check-lint
check-lint: venv-dev
	@$(BIN)/ruff check .

.PHONY: check-types
check-types: venv-dev
	@$(BIN)/mypy

.PHONY: check-imports
check-imports: venv-dev
	@$(BIN)/lint-imports --no-cache

# A data file of its own: two runs at once must not write into each other's.
.PHONY: check-coverage
check-coverage: venv-dev
	@export COVERAGE_FILE=.coverage.$$$$
	trap 'rm -f "$$COVERAGE_FILE"' EXIT
	EXAMPLES=20 $(BIN)/coverage run -m pytest -q $(PURE_TESTS)
	$(BIN)/coverage report

.PHONY: format
format: venv-dev ## put the code in its shape, and mend what ruff can mend
	@$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Into a folder of its own: the environment stays as it is locked.
.PHONY: fuzz
fuzz: SECONDS := 60
fuzz: venv-dev ## feed every parser with what it does not expect: SECONDS=60 for each, ARGS=target
	@if ! PYTHONPATH=.fuzz/lib $(BIN)/python -c 'import atheris' 2>/dev/null; then
	    $(BIN)/python -m pip install -q --only-binary :all: --require-hashes --target .fuzz/lib \
	        -r tests/fuzz/atheris.txt || echo "make: no atheris for this Python: by chance, then" >&2
	fi
	PYTHONPATH=.fuzz/lib $(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

.PHONY: kube-assets
kube-assets: packages-test venv-dev ## build the API server and KubeVirt's admitter that tests need, once: minutes, and Go; or set KUBEBUILDER_ASSETS
	@$(BIN)/python -m tests.kubernetes.assets

.PHONY: test-kernels
test-kernels: KERNELS := 6.1 6.12
test-kernels: root packages-kernels venv-dev ## boot other kernels under qemu, and run the demo, the hitless suite and some tests there
	@$(BIN)/python -m tests.kernels $(KERNELS) $(ARGS)

.PHONY: test-trixie
test-trixie: root packages-tree venv-dev ## run the demo and the tests of unit, cli and netns on Debian 13, in a tree of its own
	@$(BIN)/python -m tests.trixie $(ARGS)

##@ Set it up

.PHONY: venv venv-dev
venv: ## make or renew .venv, to run portranger; does nothing, and needs no network, when it is current
venv-dev: ## the same with the tools of make test and make check
venv-dev: WITH_TOOLS := yes
venv venv-dev: packages-python
	@($(renew_venv))
	# Where Python may not write bytecode by itself, every start would compile us anew.
	$(BIN)/python -m compileall -q agent rules

.PHONY: test-tree
test-tree: packages-test venv-dev ## make the Debian that tests boot, which else they make themselves
	@$(BIN)/python -m tests.systemd.trees

.PHONY: lock
lock: packages-python ## write the newest versions of all dependencies, with hashes, into requirements/
	@$(PYTHON) -m release.lock

.PHONY: clean
clean: ## remove .venv and everything generated
	@rm -rf $(VENV) build dist *.egg-info .coverage .coverage.* .fuzz .hypothesis .import_linter_cache \
	    .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## print this
	@awk 'BEGIN { FS = ":.*## " }
	    /^##@ / { printf "\n%s\n", substr($$0, 5) }
	    /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# ------------------------------------------------------------------------------ Debian packages

.PHONY: packages-python packages-runtime packages-test packages-deb
packages-python: PACKAGES := $(PYTHON_PACKAGES)
packages-runtime: PACKAGES := $(RUNTIME_PACKAGES)
packages-test: PACKAGES := $(TEST_PACKAGES)
packages-deb: PACKAGES := $(RUNTIME_PACKAGES)
packages-deb: PYTHON := $(DEBIAN_PYTHON)
packages-python packages-runtime packages-test packages-deb:
	@$(install_packages)

.PHONY: packages-vm packages-tree packages-kernels packages-cluster packages-image package-vagrant
packages-vm: PACKAGES := $(RUNTIME_PACKAGES) $(VM_PACKAGES)
packages-tree: PACKAGES := $(RUNTIME_PACKAGES) debootstrap systemd-container
packages-kernels: PACKAGES := $(RUNTIME_PACKAGES) $(VM_PACKAGES) debootstrap systemd-container e2fsprogs
packages-cluster: PACKAGES := curl
packages-image: PACKAGES := podman
package-vagrant: PACKAGES := vagrant
packages-vm packages-tree packages-kernels packages-cluster packages-image:
	@$(install_packages)

# Not every Debian has it: without it, its test says so.
package-vagrant:
	@if ! apt-cache show vagrant >/dev/null 2>&1; then exit; fi
	$(install_packages)

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
        procps) command -v sysctl ;;
        qemu-system-x86) command -v qemu-system-x86_64 ;;
        e2fsprogs) command -v mke2fs ;;
        systemd-container) command -v systemd-nspawn ;;
        netavark) command -v netavark || test -x /usr/lib/podman/netavark ;;
        containernetworking-plugins) test -x /usr/lib/cni/portmap ;;
        passt) command -v pasta ;;
        python3-pyftpdlib) /usr/bin/python3 -c 'import pyftpdlib' ;;
        bash-completion) test -e /usr/share/bash-completion/bash_completion ;;
        man-db) command -v man ;;
        chromium-driver) command -v chromedriver ;;
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

# --------------------------------------------------------------------- a cluster to try things on

# The Kubernetes that the tests have an API server of; and the KubeVirt that docs/comparison.md is about.
K3S := v1.34.4+k3s1
KUBEVIRT := v1.9.0
# The name that a node looks for where kubernetes/base says portranger:0.1.0.
IMAGE := docker.io/library/portranger:0.1.0

define make_cluster
if ((EUID)); then
    echo "make: k3s is installed on this very machine: run it as root" >&2
    exit 1
fi
origin=https://raw.githubusercontent.com/k3s-io/k3s/$(subst +,%2B,$(K3S))
releases=https://github.com/kubevirt/kubevirt/releases/download/$(KUBEVIRT)
echo "make: installing k3s $(K3S)"
# Whole before it is run. What it downloads, it checks.
script=$$(curl -fsSL --retry 3 "$$origin/install.sh")
INSTALL_K3S_VERSION='$(K3S)' INSTALL_K3S_EXEC='server --disable=traefik --disable=servicelb' \
    sh -s <<<"$$script"
echo "make: installing KubeVirt $(KUBEVIRT)"
k3s kubectl apply -f "$$releases/kubevirt-operator.yaml"
k3s kubectl wait --for=condition=Established --timeout=2m crd/kubevirts.kubevirt.io
k3s kubectl apply -f "$$releases/kubevirt-cr.yaml"
if [[ ! -e /dev/kvm ]]; then
    echo "make: there is no /dev/kvm, so guests are emulated: that is slow"
    k3s kubectl patch kubevirt kubevirt --namespace kubevirt --type merge \
        --patch '{"spec": {"configuration": {"developerConfiguration": {"useEmulation": true}}}}'
fi
k3s kubectl wait --for=condition=Available --timeout=20m --namespace kubevirt kubevirt/kubevirt
echo "make: next: make deploy"
endef

define deploy
if ((EUID)) || ! command -v k3s >/dev/null; then
    echo "make: it needs root, and the cluster that make cluster makes of this machine" >&2
    exit 1
fi
# The host's network: podman's own needs packages that Debian only recommends.
podman build --network host --tag '$(IMAGE)' .
podman save '$(IMAGE)' | k3s ctr images import -
k3s kubectl apply -k kubernetes
k3s kubectl rollout status --timeout=5m --namespace portranger daemonset/portranger
endef

# ------------------------------------------------------------------------- the Python environment

# .venv is current when the marks in it say what they would say now. Its dependencies are built
# anew when the pins change, or when the clone has moved (scripts hold absolute paths); when only
# pyproject.toml changed, the project is installed again beside a running command. The tools of
# developers are added when a target needs them, and stay.
define renew_venv
pins() { { pwd; cat requirements/{build,runtime,iptables}.txt; } | sha256sum; }
tools() { sha256sum <requirements/dev.txt; }
project() { sha256sum <pyproject.toml; }
says() { [[ -r $$1 && $$(<"$$1") == "$$2" ]]; }
runs() { $(BIN)/python -c '' 2>/dev/null; }
equipped() { says $(VENV)/.tools "$$(tools)"; }
built() { runs && says $(VENV)/.pins "$$(pins)" && { [[ ! -e $(VENV)/.tools ]] || equipped; }; }
complete() { [[ ! '$(WITH_TOOLS)' ]] || equipped; }
current() { built && complete && says $(VENV)/.project "$$(project)"; }
add() { $(BIN)/python -m pip install -q --no-build-isolation "$$@"; }
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
    add --require-hashes -r requirements/build.txt
    # setuptools is there already, pinned: an isolated build would download its own.
    add --require-hashes -r requirements/runtime.txt -r requirements/iptables.txt
    # pip-nftables drops an __init__.py into site-packages itself, which makes tools take the whole
    # directory for one package.
    rm -f $(VENV)/lib/python3*/site-packages/__init__.py
    pins >$(VENV)/.pins
fi
if ! complete; then
    echo "make: adding the tools of developers to $(VENV)"
    rm -f $(VENV)/.project
    add --require-hashes -r requirements/dev.txt
    tools >$(VENV)/.tools
fi
if ! current; then
    echo "make: installing portranger into $(VENV)"
    rm -f $(VENV)/.project
    $(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
    if ! told=$$($(BIN)/python -m pip check); then
        echo "make: requirements/ is not what pyproject.toml asks for: make lock" >&2
        echo "$$told" >&2
        exit 1
    fi
    project >$(VENV)/.project
fi
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
manual() { echo "$$prefix/share/man/man$${1##*.}/$${1##*/}"; }
manuals=()
for page in docs/*.[1-9]; do manuals+=("$$(manual "$$page")"); done
documents=$$prefix/share/doc/portranger
declare -A completions=(
    [bash]=$$prefix/share/bash-completion/completions/portranger
    [zsh]=$(ZSH_DIR)/_portranger
    [fish]=$(FISH_DIR)/portranger.fish
)
# A configuration that differs from what was shipped was edited, and belongs to whoever did that.
shipped=$$prefix/share/portranger/portranger.toml
configuration=/etc/portranger/portranger.toml
manifests=/etc/portranger/manifests.d
state=/var/lib/portranger
files=("$$command" "$$plugin" "$$unit" "$$restart" "$$tmpfiles" "$${manuals[@]}" "$${completions[@]}" "$$shipped"
    "$$documents/examples")
# The directories that install made, which are those that uninstall may remove.
made=$$environment/.directories
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
if ((EUID)) && [[ ! $$root ]]; then
    echo "make: to install for all, run it as root; or give a DESTDIR=" >&2
    exit 1
fi
# Those on the way to a path that are not there yet, and are not of every bare system.
bare=/:/etc:/etc/systemd:/etc/systemd/system:/etc/tmpfiles.d:/opt:/srv:/usr:/usr/local
for place in bin lib share share/man; do bare+=:/usr/$$place:/usr/local/$$place; done
missing() {
    while [[ $$1 && ! -d $$root$$1 ]]; do
        if [[ :$$bare: != *:"$$1":* ]]; then echo "$$1"; fi
        set -- "$${1%/*}"
    done
}
note_directories() {
    if [[ -r $$root$$made ]]; then cat "$$root$$made"; fi
    for path in "$$environment" "$${files[@]}" "$$manifests"; do missing "$${path%/*}"; done
}
directories=$$(note_directories | LC_ALL=C sort -ru)
mkdir -p "$$root$$prefix/lib"
take_turns
export PYTHONDONTWRITEBYTECODE=1
staging=$$root$$environment.new
scratch=$$(mktemp -d)
trap 'rm -rf "$$scratch" "$$staging"' EXIT
pins() { { $(PYTHON) -VV; cat requirements/{build,runtime,iptables}.txt; } | sha256sum; }
pip() { "$$staging/bin/python" -m pip -q "$$@"; }
add() { pip install --no-compile --root-user-action=ignore "$$@"; }
build_environment() {
    echo "make: building $$environment with $$($(PYTHON) -V)"
    rm -rf "$$staging"
    if [[ -r $$root$$environment/.pins && $$(<"$$root$$environment/.pins") == "$$(pins)" ]]; then
        cp -a "$$root$$environment" "$$staging"
    else
        $(PYTHON) -m venv "$$staging"
        add --require-hashes -r requirements/build.txt
        add --require-hashes -r requirements/runtime.txt
        # Not from pip's cache: it may be built for another Python. And without notes for a debugger,
        # which name the place where it was built.
        CFLAGS=-g0 LDFLAGS=-s add --no-cache-dir --require-hashes --no-build-isolation \
            -r requirements/iptables.txt
    fi
    # From a copy: a build leaves its traces where the sources are. And by its name: what comes from a
    # path has a note of that path.
    mkdir "$$scratch/source"
    cp -r agent rules pyproject.toml README.md LICENSE "$$scratch/source"
    pip wheel --no-deps --no-build-isolation --wheel-dir "$$scratch" "$$scratch/source"
    add --no-deps --no-index --find-links "$$scratch" --force-reinstall portranger
    rm -f "$$staging"/lib/python3*/site-packages/__init__.py "$$staging"/bin/[Aa]ctivate*
    $(PYTHON) -m release.relocate "$$staging" "$$environment"
    # The service may write nowhere: what is not compiled now would be compiled at every start. And
    # what is compiled earlier, by being run, names the wrong place. It holds whatever the times of
    # the sources are, which a copy of them may not keep.
    # Of what others wrote we do not tell what a newer Python thinks.
    "$$staging/bin/python" -W ignore -m compileall -q -j0 --invalidation-mode unchecked-hash \
        -s "$$staging" -p "$$environment" "$$staging/lib"
    pins >"$$staging/.pins"
    echo "$$directories" >"$$staging/.directories"
}
replace_environment() {
    rm -rf "$$root$$environment.old"
    if [[ -e $$root$$environment ]]; then mv -T "$$root$$environment" "$$root$$environment.old"; fi
    mv -T "$$staging" "$$root$$environment"
    rm -rf "$$root$$environment.old"
}
put() { install -D -m 644 "$$1" "$$root$$2"; }
# Of this machine, or where it has none, of the Debian that it is.
systemd_version() {
    if command -v systemctl >/dev/null; then
        systemctl --version | sed -n '1s/^systemd \([0-9]*\).*/\1/p'
    else
        (. /etc/os-release && echo $$(($${VERSION_ID%%.*} >= 13 ? 257 : 252)))
    fi
}
put_files() {
    install -d "$$root$$prefix/bin"
    ln -sfn "$$environment/bin/portranger" "$$root$$command"
    ln -sfn "$$environment/bin/kubectl-portranger" "$$root$$plugin"
    sed "s|/usr/local/bin/|$$prefix/bin/|" systemd/portranger.service >"$$scratch/unit"
    put "$$scratch/unit" "$$unit"
    if (($$(systemd_version) >= 254)); then
        put systemd/restart.conf "$$restart"
    fi
    put systemd/tmpfiles.conf "$$tmpfiles"
    for page in docs/*.[1-9]; do put "$$page" "$$(manual "$$page")"; done
    rm -rf "$$root$$documents/examples"
    find examples -type f | while read -r path; do put "$$path" "$$documents/$$path"; done
    for shell in "$${!completions[@]}"; do
        "$$root$$environment/bin/python" -I -m agent.entry completion "$$shell" >"$$scratch/$$shell"
        put "$$scratch/$$shell" "$${completions[$$shell]}"
    done
}
put_configuration() {
    [[ -d $$root$$manifests ]] || install -d "$$root$$manifests"
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

# ---------------------------------------------------------------------------------------- release

# What `make install` puts there is what is packed.
define build_package
scratch=$$(mktemp -d)
trap 'rm -rf "$$scratch"' EXIT
$(MAKE) --silent install PREFIX=/usr DESTDIR="$$scratch/tree" PYTHON=$(DEBIAN_PYTHON) >"$$scratch/log"
$(DEBIAN_PYTHON) -B -m release.debian "$$scratch/tree" dist
endef

# In an environment of its own: pip-audit needs more than all the rest of us. Strict: what could not be
# asked about counts as a finding.
define audit
scratch=$$(mktemp -d)
trap 'rm -rf "$$scratch"' EXIT
$(PYTHON) -m venv "$$scratch/venv"
"$$scratch/venv/bin/python" -m pip install -q pip-audit
"$$scratch/venv/bin/pip-audit" --strict --require-hashes --disable-pip \
    $(patsubst %,-r %,$(wildcard requirements/*.txt))
endef

# What a package put there is the package's, which has no such list.
define uninstall
packaged() { [[ ! $$root ]] && dpkg-query --search "$$1" &>/dev/null; }
prune() {
    for path; do
        if ! packaged "$$path"; then rmdir "$$root$$path" 2>/dev/null || true; fi
    done
}
package() { packaged /usr/bin/portranger; }
if [[ ! -e $$root$$made ]]; then
    echo "make: nothing of portranger is below $$root$$prefix that make install put there"
    if package; then echo "make: there is a package, which dpkg --remove portranger removes"; fi
    exit
fi
take_turns
mapfile -t directories <"$$root$$made"
if here && [[ -e $$unit ]]; then systemctl -q disable --now portranger.service; fi
if ! edited && ! packaged "$$configuration"; then rm -f "$$root$$configuration"; fi
# The environment is last: while it is there, a removal that was cut short can be done again.
for path in "$${files[@]}" "$$environment"; do rm -rf "$$root$$path"; done
prune "$$manifests" "$${configuration%/*}" "$${directories[@]}"
if here; then systemctl daemon-reload; fi
echo "make: removed portranger$${root:+ below $$root}"
for path in "$$configuration" "$$manifests" "$$state"; do
    if [[ -e $$root$$path ]]; then echo "make: kept $$path"; fi
done
if package; then
    echo "make: the package portranger stays; to use it: systemctl enable --now portranger"
fi
if [[ ! $$root ]]; then
    echo "make: rules that are live go on forwarding until the machine restarts, or until"
    echo "make:   make venv && $(BIN)/portranger clear"
fi
endef
