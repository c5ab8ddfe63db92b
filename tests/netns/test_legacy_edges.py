"""The iptables backend where somebody was at our chains, or the backend changes with the ports."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from agent.kernel.lab import POD, Lab, built
from agent.kernel.live import LiveKernel
from agent.kernel.probe import asks, connected, echoing
from agent.reconcile import converge
from rules.desired import desire
from rules.model import Desired, Protocol
from rules.plan import diff
from rules.xtables import script
from tests.spaces import IPTABLES, LEGACY, applied, kernel, observed, require, vm, within


@pytest.fixture
def lab() -> Iterator[Lab]:
    with built(f"prl{os.getpid()}") as made:
        yield made


def legacy(lab: Lab, command: str) -> None:
    subprocess.run(["ip", "netns", "exec", lab.pod, *command.split()], check=True)


@pytest.mark.parametrize(
    "damage",
    [
        "iptables-legacy -t nat -F PORTRANGER-PREROUTING",
        "iptables-legacy -t nat -F",
        "ip6tables-legacy -t nat -F PORTRANGER-PREROUTING",
        "iptables-legacy -t nat -D PREROUTING 1",
    ],
)
@pytest.mark.parametrize("wanted", ["1000-2000,3000/udp", ""], ids=["mended", "removed"])
def test_the_script_mends_what_apply_would(lab: Lab, damage: str, wanted: str) -> None:
    require(IPTABLES)
    kernel = LiveKernel("iptables")
    try:
        with kernel.opened(lab.pod) as namespace:
            links = namespace.surroundings()
            converge("x", desire([vm("a", "1000-2000,3000/udp")], links), namespace)
            legacy(lab, damage)
            after = desire([vm("a", wanted)] if wanted else [], links)
            names = [sysctl.name for sysctl in after.sysctls]
            text = script(diff("x", after, namespace.observe(names)))
            for program in ("iptables-legacy-restore", "ip6tables-legacy-restore"):
                command = ["ip", "netns", "exec", lab.pod, program, "--noflush"]
                subprocess.run(command, input=text, text=True, check=True)
            assert diff("x", after, namespace.observe(names)).empty
    finally:
        kernel.close()


@pytest.mark.parametrize(
    ("one", "other"), [("nftables", "iptables"), ("iptables", "nftables")], ids=["there", "back"]
)
def test_ports_that_go_with_a_change_of_backends_are_closed(lab: Lab, one: str, other: str) -> None:
    require(IPTABLES)
    before, after = LiveKernel(one), LiveKernel(other)
    try:
        with echoing(lab, lab.guest, [(Protocol.TCP, 1500), (Protocol.TCP, 1600)]):
            with before.opened(lab.pod) as namespace:
                links = namespace.surroundings()
                converge("x", desire([vm("a", "1500,1600")], links), namespace)
            stays = connected(lab, lab.client, POD[0].ip, Protocol.TCP, 1500)
            goes = connected(lab, lab.client, POD[0].ip, Protocol.TCP, 1600)
            with stays, goes:
                assert (asks(stays), asks(goes)) == (1500, 1600)
                with after.opened(lab.pod) as namespace:
                    converge("x", desire([vm("a", "1500")], links), namespace)
                assert asks(stays) == 1500
                goes.settimeout(0.5)
                with pytest.raises(OSError, match=r"reset|timed out"):
                    asks(goes)
    finally:
        before.close()
        after.close()


def test_a_chain_with_a_name_like_ours_is_not_ours(lab: Lab) -> None:
    require(IPTABLES)
    kernel = LiveKernel("iptables")
    try:
        legacy(lab, "iptables-legacy -t nat -N PORTRANGER-FOO")
        with kernel.opened(lab.pod) as namespace:
            converge("x", desire([vm("a", "22")], namespace.surroundings()), namespace)
            converge("x", desire([], None), namespace)
            assert not namespace.observe().table
        legacy(lab, "iptables-legacy -t nat -X PORTRANGER-FOO")
    finally:
        kernel.close()


# ------------------------------------------------------------------------------- what is no text

ODD = "a\udcffb"  # the byte 0xff in the middle, as Python passes it to programs
OWN = "PORTRANGER-PREROUTING"
SPANS = ",".join(f"0x{number:x}:0xffff" for number in range(10))
LONG = "&&".join(f"{place}={SPANS}" for place in range(0, 40, 4))


def ruled(netns: str, *words: str) -> None:
    """Do that with the translations of both families."""
    for command in LEGACY.values():
        within(netns, command, "-w", "-t", "nat", *words)


def cleared(netns: str, backend: str) -> None:
    with kernel(backend).opened(netns) as namespace:
        converge(netns, Desired(), namespace)


@pytest.mark.parametrize("backend", ["auto", "iptables", "nftables"])
def test_a_chain_of_others_may_have_any_name(lab: Lab, backend: str) -> None:
    require(backend)
    ruled(lab.pod, "-N", ODD)
    ruled(lab.pod, "-A", ODD, "-p", "udp", "-j", "RETURN")
    with kernel("auto").opened(lab.pod) as namespace:
        assert "2 rules of others" in namespace.reason
    applied(lab.pod, vm("a", "22"), backend=backend)
    assert applied(lab.pod, vm("a", "22"), backend=backend).empty
    cleared(lab.pod, backend)
    assert not observed(lab.pod, backend).table
    ruled(lab.pod, "-D", ODD, "-p", "udp", "-j", "RETURN")  # it is still there
    ruled(lab.pod, "-X", ODD)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["-m", "comment", "--comment", ODD], id="a comment"),
        pytest.param(["-i", ODD], id="a link"),
        pytest.param(["-j", ODD], id="a jump"),
        pytest.param(["-m", "u32", "--u32", LONG], id="longer than python-iptables reads"),
    ],
)
def test_what_python_iptables_cannot_read_goes_from_our_chains(lab: Lab, words: list[str]) -> None:
    require(IPTABLES)
    ruled(lab.pod, "-N", ODD)
    applied(lab.pod, vm("a", "22"), backend="iptables")
    ruled(lab.pod, "-I", OWN, *words)
    assert len(observed(lab.pod, "iptables").foreign) == 2
    plan = applied(lab.pod, vm("a", "22"), backend="iptables")
    assert (len(plan.remove), plan.add, plan.change) == (2, (), ())
    assert observed(lab.pod, "iptables").foreign == ()
    ruled(lab.pod, "-X", ODD)  # which nothing leads to any more


def test_jumps_to_our_chains_go_with_them_also_from_a_chain_whose_name_is_no_text(lab: Lab) -> None:
    applied(lab.pod, vm("a", "22"), backend="iptables")
    ruled(lab.pod, "-N", ODD)
    ruled(lab.pod, "-A", ODD, "-j", OWN)
    cleared(lab.pod, "iptables")
    assert not observed(lab.pod, "iptables").table
    ruled(lab.pod, "-X", ODD)  # which is empty
