"""Namespaces: found in every way they can be named, left again whatever happens, and not kept
alive; and what rtnetlink says of them is what `ip` says."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from ipaddress import ip_interface
from pathlib import Path

import pytest

from agent.errors import Failure, NoNamespace
from agent.kernel import netns as namespaces
from agent.kernel.live import LiveKernel
from agent.kernel.netns import inside, opened
from agent.kernel.rtnetlink import surroundings
from agent.reconcile import converge
from rules.model import Surroundings
from tests.spaces import (
    applied,
    eventually,
    home,
    ip,
    kernel,
    manifest,
    observed,
    pod,
    portranger,
    process,
    run,
    space,
    unused_name,
    using,
    vm,
    wanted,
    within,
)


@pytest.fixture
def netns() -> Iterator[str]:
    with space() as name:
        yield name


@pytest.fixture(autouse=True)
def stays_at_home() -> Iterator[None]:
    """Whatever a test does, its thread is where it was."""
    before = home()
    yield
    assert home() == before


def inode(netns: str) -> str:
    return f"net:[{Path('/run/netns', netns).stat().st_ino}]"


def seen_from(netns: str) -> str:
    """The namespace that a thread is in which followed that name."""
    with opened(netns) as descriptor, inside(descriptor, netns):
        return home()


# ------------------------------------------------------------------------------------- naming


def test_a_namespace_is_found_by_its_name(netns: str) -> None:
    assert seen_from(netns) == inode(netns)
    assert netns in namespaces.names()


def test_a_namespace_is_found_by_its_path(netns: str, tmp_path: Path) -> None:
    assert seen_from(f"/run/netns/{netns}") == inode(netns)
    link = tmp_path / "link"
    link.symlink_to(f"/run/netns/{netns}")
    assert seen_from(str(link)) == inode(netns)


def test_a_namespace_is_found_by_a_process_in_it(netns: str) -> None:
    with process("sleep", "60", netns=netns) as child:
        assert seen_from(f"pid:{child.pid}") == inode(netns)
        assert seen_from(f"/proc/{child.pid}/ns/net") == inode(netns)


def test_a_name_of_digits_is_a_name_where_there_is_one() -> None:
    name = f"99{os.getpid()}{id(object()) % 1000}"  # no process has so long a number
    run("ip", "netns", "add", name)
    try:
        assert seen_from(name) == inode(name)
        with pytest.raises(NoNamespace):
            seen_from(f"pid:{name}")
    finally:
        run("ip", "netns", "del", name)


def test_a_namespace_without_a_name_is_served_by_its_process() -> None:
    with space() as name, process("sleep", "60", netns=name) as child:
        run("ip", "netns", "del", name)
        ip_words = ("nsenter", f"--net=/proc/{child.pid}/ns/net", "ip")
        run(*ip_words, "link", "add", "eth0", "type", "bridge")
        run(*ip_words, "addr", "add", "192.0.2.2/24", "dev", "eth0")
        text = manifest("somewhere-else", "1000-8000")
        done = portranger("apply", "--yes", "--netns", f"pid:{child.pid}", "-f", "-", stdin=text)
        assert done.returncode == 0, done.stderr
        assert len(observed(f"pid:{child.pid}").live) == 5
        done = portranger("plan", "--netns", str(child.pid), "-f", "-", stdin=text)
        assert "No changes. 5 rules match." in done.stdout, "a number is a process, too"


def test_a_machine_that_is_called_a_number_is_not_in_the_namespace_of_a_process(
    netns: str,
) -> None:
    with process("sleep", "60", netns=netns) as child:
        named = manifest("unused", "1000-8000").replace("unused", f'"{child.pid}"')
        done = portranger("apply", "--yes", "-f", "-", stdin=named)
        assert done.returncode == 75
        assert f"there is no network namespace {child.pid}" in done.stderr
        assert not observed(netns).table


@pytest.mark.parametrize(
    "name",
    ["nowhere", "/nowhere/at/all", "/dev/null/x", "pid:4194305", "4194305", "pid:", "pid:x", ".."],
)
def test_a_namespace_that_is_not_there_is_said_so(name: str) -> None:
    with pytest.raises(NoNamespace) as failure, LiveKernel().opened(name):
        pass
    assert failure.value.exit_code == 75
    assert name in str(failure.value)
    a_process = name.startswith("pid:")
    assert ("process" if a_process else "--netns") in str(failure.value)


def test_what_is_no_namespace_is_said_so(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    for path in (plain, tmp_path, Path("/proc/self/ns/mnt"), Path("/dev/null")):
        with pytest.raises(NoNamespace, match=str(path)), LiveKernel().opened(str(path)):
            pass


def test_a_pipe_in_the_place_of_a_namespace_is_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert portranger("show", "--netns", fifo).returncode == 75


def test_a_name_that_is_left_over_without_its_namespace_is_said_so() -> None:
    left_over = Path("/run/netns", unused_name())
    left_over.touch()  # what `ip netns add` leaves behind where it is interrupted
    try:
        with pytest.raises(NoNamespace), LiveKernel().opened(left_over.name):
            pass
        with pod() as name:
            applied(name, vm("a", "22"))
            assert f"namespace {name} (nftables: " in portranger("show").stdout
    finally:
        left_over.unlink()


def test_who_mistypes_a_name_is_told_what_may_have_been_meant() -> None:
    with space() as name:
        wrong = f"{name[1]}{name[0]}{name[2:]}"
        for command in (("show",), ("clear", "--yes")):
            done = portranger(*command, "--netns", wrong)
            assert f"{wrong}. Did you mean {name}? Create it (ip netns add " in done.stderr
        unlike = portranger("show", "--netns", "x")
        assert "Did you mean" not in unlike.stderr
        assert "namespace x. Create it (ip netns add x), or" in unlike.stderr


@pytest.mark.parametrize("command", ["plan", "apply"])
def test_the_command_ends_with_75_for_a_namespace_that_is_not_there(command: str) -> None:
    words = [command, "-f", "-", *(["--yes"] if command == "apply" else [])]
    done = portranger(*words, stdin=manifest("nowhere", "22"))
    assert done.returncode == 75
    assert "there is no network namespace nowhere" in done.stderr
    assert "ip netns add nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_namespace_that_is_missing_does_not_stop_the_others() -> None:
    with pod() as name:
        texts = "---\n".join((manifest("nowhere", "22", "a"), manifest(name, "23", "b")))
        done = portranger("apply", "--yes", "-f", "-", stdin=texts)
        assert done.returncode == 75
        assert {str(live.rule.ports) for live in observed(name).live if live.rule.ports} == {"23"}


# --------------------------------------------------------------------------------- permission

AS_NOBODY = """
import os, sys
import agent.cli, agent.entry, agent.kernel.live, agent.sources.yaml_text
from agent.commands import apply, clear, explain, plan, show
# Python itself may be out of reach for nobody: what is loaded late is loaded now.
agent.cli.run(["plan", "--netns", "nowhere", "-f", "examples/desktop.yaml"])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(agent.entry.guarded(lambda: agent.cli.run(sys.argv[1:])))
"""


@pytest.mark.parametrize("command", [["plan", "-f", "-"], ["apply", "--yes", "-f", "-"]])
def test_an_ordinary_user_is_told_which_capability_is_missing(command: list[str]) -> None:
    with pod() as name:
        words = (sys.executable, "-c", AS_NOBODY, *command)
        done = run(*words, stdin=manifest(name, "22"), code=77)
        assert "CAP_SYS_ADMIN" in done.stderr
        assert "Traceback" not in done.stderr
        assert not observed(name).table


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """A pod with a rule in it that nobody is allowed to touch."""
    with pod() as name:
        applied(name, vm("a", "22"))
        yield name


def without(capability: str) -> tuple[str, ...]:
    """A prefix to a command that runs it as root without a capability."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs the command setpriv (Debian: util-linux)")
    return ("setpriv", "--bounding-set", f"-{capability}", "--inh-caps", f"-{capability}")


@pytest.mark.parametrize("capability", ["net_admin", "sys_admin"])
@pytest.mark.parametrize(
    "command",
    [
        ["plan", "-f", "-"],
        ["apply", "--yes", "-f", "-"],
        ["show", "--netns", "{}"],
        ["show", "--backend", "iptables", "--netns", "{}"],
        ["clear", "--yes", "--netns", "{}"],
        ["explain", "--live", "--netns", "{}", "tcp/22"],
    ],
    ids=lambda words: words[0],
)
def test_root_is_told_which_capability_is_missing(
    served: str, command: list[str], capability: str
) -> None:
    before = observed(served)
    done = run(
        *without(capability),
        *(sys.executable, "-m", "agent.entry", *(word.format(served) for word in command)),
        stdin=manifest(served, "80"),
        code=None,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 77, done.stderr
    assert f"CAP_{capability.upper()}" in done.stderr
    assert observed(served) == before


# ------------------------------------------------------------------------ coming home, letting go


def fails_inside(netns: str) -> None:
    with opened(netns) as descriptor, inside(descriptor, netns):
        assert home() == inode(netns)
        raise Failure("on purpose")


def fails_while_it_is_open(netns: str) -> None:
    with kernel("auto").opened(netns) as namespace:
        namespace.surroundings()
        raise Failure("on purpose")


def fails_within_each_other(netns: str) -> None:
    with space() as other, opened(other) as descriptor, inside(descriptor, other):
        fails_inside(netns)


@pytest.mark.parametrize("act", [fails_inside, fails_while_it_is_open, fails_within_each_other])
def test_the_thread_is_home_after_a_failure(netns: str, act: Callable[[str], None]) -> None:
    before = home()
    with pytest.raises(Failure, match="on purpose"):
        act(netns)
    assert home() == before


def test_no_descriptor_is_left_open(netns: str) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    applied(netns)  # whatever is loaded once is loaded now
    before = descriptors()
    for _ in range(20):
        applied(netns)
        with pytest.raises(Failure):
            fails_while_it_is_open(netns)
        with pytest.raises(NoNamespace), LiveKernel().opened("nowhere"):
            pass
        with pytest.raises(NoNamespace), LiveKernel().opened("/dev/null"):
            pass
    assert descriptors() == before


def test_a_deleted_namespace_is_not_kept_alive() -> None:
    with space() as witness, pod() as name:
        # A pair of veths dies with the namespace of either end.
        ip(name, f"link add tether type veth peer name tether netns {witness}")
        desired = wanted(name, [vm("a", "1000-8000")])
        with kernel("auto").opened(name) as namespace:
            converge(name, desired, namespace)
            converge(name, wanted(name, [vm("a", "22")]), namespace)
        with pytest.raises(Failure):
            fails_while_it_is_open(name)
        assert "tether" in within(witness, "ip", "-br", "link")
        run("ip", "netns", "del", name)
        assert eventually(lambda: "tether" not in within(witness, "ip", "-br", "link"))


@pytest.mark.parametrize("backend", ["nftables", "iptables"])
def test_a_deleted_namespace_is_not_kept_alive_by_a_worker_that_was_first_needed_there(
    backend: str,
) -> None:
    with space() as witness, pod() as name, closing(LiveKernel(backend)) as fresh:
        ip(name, f"link add tether type veth peer name tether netns {witness}")
        with using(backend):
            applied(name, vm("a", "22"))
        with fresh.opened(name) as namespace:
            assert namespace.observe().live
        run("ip", "netns", "del", name)
        assert eventually(lambda: "tether" not in within(witness, "ip", "-br", "link"))


def test_a_deleted_namespace_lives_while_it_is_open_and_no_longer() -> None:
    with space() as witness, pod() as name:
        ip(name, f"link add tether type veth peer name tether netns {witness}")
        with kernel("auto").opened(name) as namespace:
            desired = wanted(name, [vm("a", "22")])
            run("ip", "netns", "del", name)
            converge(name, desired, namespace)
            assert "tether" in within(witness, "ip", "-br", "link")
        assert eventually(lambda: "tether" not in within(witness, "ip", "-br", "link"))


# ------------------------------------------------------------------------------- surroundings


def told_by_kernel(netns: str) -> Surroundings:
    with opened(netns) as descriptor, inside(descriptor, netns):
        return surroundings()


def told_by_ip(netns: str) -> dict[str, set[str]]:
    return {
        link["ifname"]: {
            f"{address['local']}/{address['prefixlen']}" for address in link["addr_info"]
        }
        for link in json.loads(run("ip", "-n", netns, "-j", "addr").stdout)
    }


def default_by_ip(netns: str) -> str | None:
    """The link of the best default route, IPv4 first, as `ip` lists them."""
    for family in ("-4", "-6"):
        listed = run("ip", "-n", netns, family, "-j", "route", "show", "default").stdout
        routes = [route for route in json.loads(listed or "[]") if route.get("type") is None]
        if routes:
            best = min(routes, key=lambda route: route.get("metric", 0))
            return str(best["dev"] if "dev" in best else best["nexthops"][0]["dev"])
    return None


WIRED = (
    *(f"link add {name} type veth peer name peer{name}" for name in ("wan", "lan", "eth0.7")),
    *(f"link set {name} addrgenmode none" for name in ("wan", "lan", "eth0.7")),
    *(f"link set peer{name} addrgenmode none" for name in ("wan", "lan", "eth0.7")),
    *(f"link set {name} up" for name in ("wan", "lan", "eth0.7", "peerwan", "peerlan")),
    "link set lo up",
)
SETTINGS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "nothing": ((), None),
    "a sleeping link": (("link add wan type bridge",), None),
    "a loopback": (("link set lo up",), None),
    "several addresses": (
        (
            *WIRED,
            "addr add 192.0.2.2/24 dev wan",
            "addr add 192.0.2.3/24 dev wan",
            "addr add 198.51.100.2/32 dev wan",
            "addr add 2001:db8::2/64 dev wan nodad",
            "addr add 2001:db8::3/128 dev wan nodad",
            "addr add 169.254.7.7/16 dev lan",
        ),
        None,
    ),
    "an address in secondary, with label and peer": (
        (
            *WIRED,
            "addr add 192.0.2.2/24 dev wan label wan:1",
            "addr add 10.9.9.1 peer 10.9.9.2/32 dev lan",
        ),
        None,
    ),
    "a default route": (
        (*WIRED, "addr add 192.0.2.2/24 dev wan", "route add default via 192.0.2.1"),
        "wan",
    ),
    "a default route without a gateway": ((*WIRED, "route add default dev lan"), "lan"),
    "the lowest metric wins": (
        (
            *WIRED,
            "addr add 192.0.2.2/24 dev wan",
            "addr add 198.51.100.2/24 dev lan",
            "route add default via 192.0.2.1 metric 300",
            "route add default via 198.51.100.1 metric 20",
        ),
        "lan",
    ),
    "no metric is the lowest metric": (
        (
            *WIRED,
            "addr add 192.0.2.2/24 dev wan",
            "addr add 198.51.100.2/24 dev lan",
            "route add default via 192.0.2.1 metric 1",
            "route add default via 198.51.100.1",
        ),
        "lan",
    ),
    "several paths": (
        (
            *WIRED,
            "addr add 192.0.2.2/24 dev wan",
            "addr add 198.51.100.2/24 dev lan",
            "route add default nexthop via 198.51.100.1 weight 1 nexthop via 192.0.2.1 weight 9",
        ),
        "lan",
    ),
    "several paths of IPv6": (
        (
            *WIRED,
            "addr add 2001:db8:1::2/64 dev wan nodad",
            "addr add 2001:db8:2::2/64 dev lan nodad",
            "route add ::/0 nexthop via 2001:db8:2::1 nexthop via 2001:db8:1::1",
        ),
        "lan",
    ),
    "IPv6 alone": (
        (*WIRED, "addr add 2001:db8::2/64 dev lan nodad", "route add ::/0 via 2001:db8::1"),
        "lan",
    ),
    "IPv4 before IPv6": (
        (
            *WIRED,
            "addr add 2001:db8::2/64 dev lan nodad",
            "route add ::/0 via 2001:db8::1 metric 1",
            "addr add 192.0.2.2/24 dev wan",
            "route add default via 192.0.2.1 metric 4000",
        ),
        "wan",
    ),
    "a route that refuses is no default": ((*WIRED, "route add unreachable default"), None),
    "another table is no default": (
        (
            *WIRED,
            "addr add 192.0.2.2/24 dev wan",
            "route add default via 192.0.2.1 table 100",
            "route add default via 192.0.2.1 table 1000",
        ),
        None,
    ),
    "a wide route is no default": ((*WIRED, "route add 0.0.0.0/1 dev wan"), None),
    "a name with a dot": ((*WIRED, "addr add 192.0.2.2/24 dev eth0.7"), None),
}


@pytest.mark.parametrize(("lines", "default"), SETTINGS.values(), ids=SETTINGS)
def test_the_surroundings_are_what_ip_says(
    netns: str, lines: tuple[str, ...], default: str | None
) -> None:
    ip(netns, *lines)
    found = told_by_kernel(netns)
    assert {
        link.name: {str(address) for address in link.addresses} for link in found.links
    } == told_by_ip(netns)
    assert found.default_link == default == default_by_ip(netns)


def test_many_links_and_addresses_are_all_seen(netns: str) -> None:
    lines = [f"link add n{number} type bridge" for number in range(60)]
    lines += [
        f"addr add 10.{number}.{other}.1/24 dev n{number}"
        for number in range(60)
        for other in range(5)
    ]
    ip(netns, *lines)
    found = told_by_kernel(netns)
    assert len(found.links) == 61
    assert sum(len(link.addresses) for link in found.links) == 300
    assert found.links == tuple(sorted(found.links, key=lambda link: link.name))
    assert (
        ip_interface("10.59.4.1/24")
        in found.links[[link.name for link in found.links].index("n59")].addresses
    )
