"""What many files mean together: who ran before goes on; of two newcomers neither is guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sources.settled import settle
from rules.conflicts import clashes
from rules.model import Machine, Protocol
from rules.services import Service, ServicePort, ServiceType
from rules.values import replace
from tests.unit.samples import machine, ports

Said = dict[str, tuple[Machine, ...] | None]


def vm(file: str, *claims: str, name: str = "", netns: str = "blue") -> tuple[Machine, ...]:
    """What a file says that declares one machine, named as the file unless told otherwise."""
    return (machine(*claims, name=name or file, netns=netns, origin=f"{file}:1"),)


def service(file: str, port: str = "80", name: str = "web") -> tuple[Service, ...]:
    """What a file says that declares one Service."""
    one = ServicePort(name="", protocol=Protocol.TCP, ports=ports(port), target=ports(port))
    return (
        Service(
            namespace="default",
            name=name,
            type=ServiceType.NODE_PORT,
            ports=(one,),
            origin=f"{file}:9",
        ),
    )


A, B = vm("a", "tcp 22"), vm("b", "tcp 80")
A_ON_80 = vm("a", "tcp 22", "tcp 80")
B_ON_22 = vm("b", "tcp 22", "tcp 80")


def test_files_that_make_sense_mean_what_they_say() -> None:
    settled = settle({}, {"a": A, "b": B})
    assert settled.machines == A + B
    assert settled.meanings == {"a": A, "b": B}
    assert not settled.problems
    assert not settled.held
    assert not settled.contested


def test_a_file_that_went_means_nothing_any_more() -> None:
    assert settle({"a": A, "b": B}, {"b": B}).meanings == {"b": B}


def test_a_bad_file_means_what_it_meant_before() -> None:
    settled = settle({"a": A}, {"a": None, "b": B})
    assert settled.machines == A + B
    assert settled.held == {"a"}
    assert not settled.problems, "what is wrong in it is told by whoever read it"


def test_a_bad_file_that_never_was_good_means_nothing() -> None:
    now: Said = {"a": None}
    settled = settle({}, now)
    assert settled.meanings == {"a": ()}
    assert settled.held == {"a"}


@pytest.mark.parametrize("before", [{"a": A}, {"a": A, "b": B}], ids=["new", "changed"])
def test_who_takes_what_another_holds_is_left_as_it_was(
    before: dict[str, tuple[Machine, ...]],
) -> None:
    settled = settle(before, {"a": A, "b": B_ON_22})
    assert settled.meanings == {"a": A, "b": before.get("b", ())}
    assert settled.held == {"b"}
    assert [problem.code for problem in settled.problems] == ["conflict"]
    assert list(settled.contested) == ["blue"]
    assert "tcp 22" in settled.contested["blue"]


def test_who_has_what_another_wants_may_go_on_changing() -> None:
    """Else whoever writes a file could keep another from closing its ports."""
    wide, narrow = vm("a", "tcp 1000-2000", "tcp 80"), vm("a", "tcp 1400-1700")
    for newcomer in (vm("0", "tcp 1500-1600"), vm("z", "tcp 1500-1600")):
        (one,) = newcomer
        file = one.origin.partition(":")[0]
        settled = settle({"a": wide}, {"a": narrow, file: newcomer})
        assert settled.meanings == {"a": narrow, file: ()}
        assert settled.held == {file}
        assert {problem.file for problem in settled.problems} == {file}


def test_who_grows_into_what_another_has_is_the_one_who_is_told() -> None:
    settled = settle({"a": A, "b": B}, {"a": A_ON_80, "b": B})
    assert settled.held == {"a"}
    assert [problem.file for problem in settled.problems] == ["a"]


def test_a_copy_of_a_file_does_not_hold_the_original() -> None:
    copied = vm("b", "tcp 22", name="a")
    settled = settle({"a": vm("a", "tcp 22-30")}, {"a": A, "b": copied})
    assert settled.machines == A
    assert settled.held == {"b"}


def test_a_bad_file_defends_what_it_held() -> None:
    settled = settle({"a": A}, {"a": None, "b": B_ON_22})
    assert settled.meanings == {"a": A, "b": ()}
    assert settled.held == {"a", "b"}


def test_of_two_newcomers_in_conflict_neither_is_guessed() -> None:
    settled = settle({}, {"a": A, "b": B_ON_22, "c": vm("c", "tcp 443")})
    assert settled.machines == vm("c", "tcp 443")
    assert settled.held == {"a", "b"}


def test_of_two_that_both_changed_both_are_left_as_they_were() -> None:
    settled = settle({"a": A, "b": B}, {"a": A_ON_80, "b": B_ON_22})
    assert settled.meanings == {"a": A, "b": B}
    assert settled.held == {"a", "b"}
    assert len(settled.problems) == 2


def test_two_that_swap_their_ports_at_once_may() -> None:
    settled = settle({"a": A, "b": B}, {"a": vm("a", "tcp 80"), "b": vm("b", "tcp 22")})
    assert settled.meanings == {"a": vm("a", "tcp 80"), "b": vm("b", "tcp 22")}
    assert not settled.held


def test_one_that_is_left_as_it_was_may_be_in_the_way_of_a_third() -> None:
    """b goes from 80 to 22, which is taken, so it stays on 80, which c wanted."""
    c = vm("c", "tcp 80")
    settled = settle({"a": A, "b": B}, {"a": A, "b": vm("b", "tcp 22"), "c": c})
    assert settled.meanings == {"a": A, "b": B, "c": ()}
    assert settled.held == {"b", "c"}


def test_quarrels_that_were_there_before_leave_nothing_of_either() -> None:
    """As after an update that finds more conflicts than the version before."""
    settled = settle({"a": A, "b": B_ON_22}, {"a": A, "b": B_ON_22})
    assert settled.machines == ()
    assert settled.held == {"a", "b"}


def test_a_machine_that_is_written_twice_stays_where_it_was() -> None:
    copied = vm("b", "tcp 22", name="a")
    settled = settle({"a": A}, {"a": A, "b": copied})
    assert settled.machines == A
    assert settled.held == {"b"}
    assert {problem.code for problem in settled.problems} == {"duplicate-machine"}


def test_a_machine_that_moves_to_another_file_is_no_quarrel() -> None:
    moved = vm("b", "tcp 22", name="a")
    settled = settle({"a": A}, {"b": moved})
    assert settled.machines == moved
    assert not settled.held


def test_the_same_ports_in_other_namespaces_are_no_quarrel() -> None:
    other = vm("b", "tcp 22", netns="red")
    assert settle({}, {"a": A, "b": other}).machines == A + other


def test_a_machine_is_left_to_its_running_instance_and_said_so() -> None:
    (one,) = vm("b", "tcp 22", name="a")
    instance = (replace(one, kind="VirtualMachineInstance"),)
    settled = settle({}, {"a": A, "b": instance})
    assert settled.machines == instance
    assert len(settled.left) == 1
    assert not settled.held


def test_however_many_quarrel_it_comes_to_an_end() -> None:
    """Each wants the next one's port, and the last one the first's."""
    count = 200
    before = {f"f{n}": vm(f"f{n}", f"tcp {n + 1}") for n in range(count)}
    now: Said = {f"f{n}": vm(f"f{n}", f"tcp {(n + 1) % count + 1}") for n in range(count)}
    assert not settle(before, now).held
    now["f0"] = None
    settled = settle(before, now)
    assert settled.meanings == before
    assert len(settled.held) == count


BOTH = Machine | Service
C_SERVED = service("c", name="x")
SERVED: dict[str, tuple[dict[str, tuple[BOTH, ...]], dict[str, tuple[BOTH, ...] | None], str]] = {
    "what makes sense": ({}, {"a": A + service("a"), "b": service("b", name="x")}, "a:9 b:9"),
    "a file that went": ({"a": service("a"), "b": service("b")}, {"b": service("b")}, "b:9"),
    "a bad file": ({"a": A + service("a")}, {"a": None}, "a:9"),
    "another port": ({"a": service("a")}, {"a": service("a", "81")}, "a:9"),
    "a move": ({"a": service("a")}, {"b": service("b")}, "b:9"),
    "a copy": ({"b": service("b")}, {"a": service("a"), "b": service("b", "81")}, "b:9"),
    "a copy of what is bad": ({"b": service("b")}, {"a": service("a"), "b": None}, "b:9"),
    "two newcomers": ({}, {"a": service("a"), "b": service("b"), "c": C_SERVED}, "c:9"),
    "one file that says it twice": ({}, {"a": service("a") + service("a", "81")}, ""),
    "two that always quarrelled": (
        {"a": service("a"), "b": service("b")},
        {"a": service("a"), "b": service("b")},
        "",
    ),
    "a copy of a machine beside it": (
        {"b": vm("b", "tcp 22", name="a")},
        {"a": A + service("a"), "b": vm("b", "tcp 22", name="a")},
        "",
    ),
    "a quarrel of the machine beside it": (
        {"a": A, "b": B + service("b")},
        {"a": A, "b": B_ON_22 + service("b", "81", name="y")},
        "b:9",
    ),
}


@pytest.mark.parametrize(("before", "now", "served"), SERVED.values(), ids=SERVED)
def test_services_are_settled_as_machines_are(
    before: dict[str, tuple[BOTH, ...]], now: dict[str, tuple[BOTH, ...] | None], served: str
) -> None:
    settled = settle(before, now)
    assert " ".join(one.origin for one in settled.services) == served
    said = [one for meaning in settled.meanings.values() for one in meaning]
    assert settled.services == tuple(one for one in said if isinstance(one, Service))
    for file, meaning in settled.meanings.items():
        assert meaning in (before.get(file, ()) if file in settled.held else now[file], ())
    assert settle(settled.meanings, now).meanings == settled.meanings


def test_a_quarrel_about_a_service_holds_all_that_its_file_says() -> None:
    copy = B + service("b", "81")
    before: dict[str, tuple[BOTH, ...]] = {"a": service("a"), "b": vm("b", "tcp 443")}
    settled = settle(before, {"a": service("a"), "b": copy})
    assert settled.machines == vm("b", "tcp 443")
    assert settled.services == service("a")
    assert settled.held == {"b"}
    assert [problem.code for problem in settled.problems] == ["duplicate-service"]
    assert not settled.contested, "it is in no namespace of a machine"


PORTS = st.sets(st.integers(1, 4), min_size=1, max_size=2)
CLAIMED = st.dictionaries(st.sampled_from("abcd"), PORTS)


def files(claimed: dict[str, set[int]]) -> dict[str, tuple[Machine, ...]]:
    return {file: vm(file, *(f"tcp {port}" for port in ports)) for file, ports in claimed.items()}


@given(CLAIMED, CLAIMED, st.sets(st.sampled_from("abcd")))
def test_whatever_files_say_the_outcome_is_sound(
    claimed: dict[str, set[int]], claimed_now: dict[str, set[int]], bad: set[str]
) -> None:
    before = settle({}, files(claimed)).meanings
    said: Said = {**files(claimed_now), **dict.fromkeys(bad)}
    settled = settle(before, said)
    assert not clashes(settled.machines)
    assert settled.meanings.keys() == said.keys()
    for file, meaning in settled.meanings.items():
        assert meaning == (before.get(file, ()) if file in settled.held else said[file])
    assert {problem.code for problem in settled.problems} <= {"conflict"}
    assert bool(settled.contested) == bool(settled.problems)
    assert settle(settled.meanings, said).meanings == settled.meanings
