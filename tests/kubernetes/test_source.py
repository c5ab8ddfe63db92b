"""The instances of a node in view of a real API server: what is heard, what is kept, and what is
never dropped."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from agent.sources.credentials import Credentials, Material, Plain, endpoint
from agent.sources.following import Follower
from agent.sources.kubeconfig import load
from agent.sources.store import Store
from tests.kubernetes.cluster import LOOPBACK, Cluster
from tests.kubernetes.instances import (
    RANGES,
    RIGHTS,
    Asked,
    Cable,
    Machines,
    asking,
    claims,
    instance,
    machines,
    pod_uid,
    pods,
    realistic,
)
from tests.spaces import eventually, run, unused_name

Json = dict[str, object]
Start = Callable[[], AbstractContextManager[Asked]]


@pytest.fixture
def vmis(cluster: Cluster, namespace: str) -> Machines:
    cluster.grant("portranger", RIGHTS)
    return Machines(cluster, namespace)


@pytest.fixture
def node() -> str:
    """A node of its own: all tests share a cluster."""
    return unused_name()


@pytest.fixture
def start(vmis: Machines, node: str, tmp_path: Path) -> Start:
    """A source of that node; the next one finds what the one before left."""
    credentials = load(str(vmis.cluster.kubeconfig("portranger")), {})
    return lambda: asking(credentials, node, tmp_path / "state")


@pytest.fixture
def asked(start: Start) -> Iterator[Asked]:
    with start() as made:
        yield made


# ------------------------------------------------------------------------------ what is heard


def test_instances_come_change_and_go(vmis: Machines, node: str, asked: Asked) -> None:
    assert asked.has().count == 0
    made = vmis.make(instance("web", node, "22,1000-2000/udp"))
    meaning = asked.has("web")
    [machine] = meaning.machines
    assert claims(meaning) == {"web": "22/tcp,1000-2000/udp"}
    assert {machine.netns.removeprefix("pod:")} == made["status"]["activePods"].keys()
    assert str(machine) == f"VirtualMachineInstance/{vmis.namespace}/web"
    assert machine.masquerade
    assert machine.masquerade.entry == "eth0"
    reference = asked.source.reference(str(machine))
    assert reference is not None
    assert (reference.uid, reference.name) == (made["metadata"]["uid"], "web")
    vmis.annotate("web", port_ranges="23")
    asked.until(lambda it: claims(it) == {"web": "23/tcp"})
    vmis.remove("web")
    assert asked.has().count == 0
    assert asked.source.reference(str(machine)) is None


def test_what_is_there_at_the_start_is_known_at_the_first_look(
    vmis: Machines, node: str, start: Start
) -> None:
    vmis.make(instance("web", node))
    with start() as asked:
        assert machines(asked.meaning) == ["web"]
        assert not asked.meaning.unreadable


def test_what_is_on_other_nodes_is_not_ours(vmis: Machines, node: str, asked: Asked) -> None:
    vmis.make(instance("elsewhere", "other"))
    vmis.make(instance("nowhere", node, pods={pod_uid(): "other", "": ""}))
    vmis.make(instance("ended", node, phase="Succeeded"))
    vmis.make(instance("failed", node, phase="Failed"))
    vmis.make(instance("here", node))
    asked.until(lambda it: it.count == 4)
    assert machines(asked.meaning) == ["here"]


def test_only_what_changed_is_read_again(vmis: Machines, node: str, asked: Asked) -> None:
    for number in range(10):
        vmis.make(instance(f"vm-{number}", node))
    asked.has(*(f"vm-{number}" for number in range(10)))
    asked.beats = 0
    vmis.annotate("vm-7", port_ranges="7")
    asked.until(lambda it: claims(it)["vm-7"] == "7/tcp")
    assert asked.beats == 1


def test_what_does_not_concern_us_wakes_nobody(vmis: Machines, node: str, asked: Asked) -> None:
    vmis.make(instance("web", node))
    asked.has("web")
    while asked.turn():
        pass
    looks = asked.looks
    vmis.change("web", {"status": {"guestOSInfo": {"id": "fedora"}}})
    told = vmis.change("web", {"metadata": {"annotations": {"other.example/x": "y"}}})
    assert not asked.turn(0.5)
    assert asked.looks == looks
    asked.look()
    reference = asked.source.reference(f"VirtualMachineInstance/{vmis.namespace}/web")
    assert reference is not None
    assert reference.resource_version == told["metadata"]["resourceVersion"]


def test_a_status_that_names_no_pod_leads_nowhere(vmis: Machines, node: str, asked: Asked) -> None:
    vmis.make(instance("web", node, pods={"../../../../proc/1": node, "host": node}))
    meaning = asked.until(lambda it: it.count == 1)
    assert machines(meaning) == []
    assert len(meaning.skipped) == 2
    assert "'../../../../proc/1' in status.activePods is no pod" in meaning.skipped[0]


def test_every_field_of_a_real_instance_is_borne(
    vmis: Machines, node: str, asked: Asked, tmp_path: Path
) -> None:
    vmis.make(realistic("web", node))
    meaning = asked.has("web")
    assert not meaning.problems
    [text] = Store(str(tmp_path / "state"), print).load().values()
    assert len(text) < 2000
    assert "cloudInit" not in text


# --------------------------------------------------------------------------- last good meaning


def test_what_turns_bad_goes_on_and_says_why(vmis: Machines, node: str, asked: Asked) -> None:
    vmis.make(instance("web", node, "1000-2000"))
    label = f"VirtualMachineInstance/{vmis.namespace}/web"
    asked.has("web")
    vmis.annotate("web", port_ranges="2000-1000")
    meaning = asked.until(lambda it: it.held == (label,))
    assert claims(meaning) == {"web": "1000-2000/tcp"}
    [problem] = meaning.problems
    assert (problem.file, problem.line) == (label, 0)
    assert str(problem).startswith(f"{label}: metadata.annotations['{RANGES}']: ")
    assert meaning.unknown == ()
    vmis.annotate("web", port_ranges="3000")
    asked.until(lambda it: claims(it) == {"web": "3000/tcp"} and not it.problems)


@pytest.mark.parametrize("key", ["netns", "interface", "guest", "address"])
def test_an_annotation_for_bare_metal_is_refused(
    vmis: Machines, node: str, asked: Asked, key: str
) -> None:
    vmis.make(instance("web", node, "1000-2000"))
    asked.has("web")
    vmis.annotate("web", port_ranges="23", **{key: "10.0.0.1"})
    meaning = asked.until(lambda it: it.held)
    assert [problem.code for problem in meaning.problems] == ["tenant-annotation"]
    assert claims(meaning) == {"web": "1000-2000/tcp"}
    vmis.make(instance("new", node, annotations={key: "10.0.0.1"}))
    asked.until(lambda it: len(it.problems) == 2)
    assert claims(asked.meaning) == {"web": "1000-2000/tcp", "new": ""}
    assert [label.rpartition("/")[2] for label in asked.meaning.shut] == ["new"]


def test_what_is_bad_is_selected_by_the_labels_it_has_now(
    vmis: Machines, node: str, start: Start
) -> None:
    with start() as asked:
        vmis.make(instance("web", node, "1000-2000"))
        asked.has("web")
        vmis.annotate("web", port_ranges="bad")
        asked.until(lambda it: it.held)
        vmis.change("web", {"metadata": {"labels": {"role": "db"}}})
        asked.until(lambda it: ("role", "db") in it.machines[0].labels)
        assert claims(asked.meaning) == {"web": "1000-2000/tcp"}
    with start() as asked:
        assert ("role", "db") in asked.meaning.machines[0].labels


def test_what_is_bad_is_still_followed_to_where_it_is(
    vmis: Machines, node: str, start: Start
) -> None:
    with start() as asked:
        vmis.make(instance("web", node, "1000-2000"))
        asked.has("web")
        vmis.annotate("web", port_ranges="bad")
        asked.until(lambda it: it.held)
        new = pod_uid()
        vmis.change(
            "web", {"status": {"activePods": {**dict.fromkeys(pods(asked.meaning)), new: node}}}
        )
        asked.until(lambda it: pods(it) == {new})
        assert claims(asked.meaning) == {"web": "1000-2000/tcp"}
    with start() as asked:
        assert asked.source.namespaces == {f"pod:{new}"}
        assert claims(asked.meaning) == {"web": "1000-2000/tcp"}
        assert asked.meaning.held


def test_another_of_the_same_name_has_no_past(vmis: Machines, node: str, start: Start) -> None:
    with start() as asked:
        vmis.make(instance("web", node))
        asked.has("web")
        vmis.remove("web")
        vmis.make(instance("web", node, "bad"))
        asked.until(lambda it: it.problems)
        assert claims(asked.meaning) == {"web": ""}  # what it declares, nobody understands
        assert asked.meaning.held == ()
    with start() as asked:
        assert claims(asked.meaning) == {"web": ""}


def test_a_pod_belongs_to_whoever_had_it_first(vmis: Machines, node: str, start: Start) -> None:
    """The status of an instance can be written by whoever may write the instance."""
    pod = pod_uid()
    with start() as asked:
        vmis.make(instance("victim", node, "22", pods={pod: node}))
        asked.has("victim")
        vmis.make(instance("attacker", node, "1-65535", pods={pod: node}))
        meaning = asked.until(lambda it: it.problems)
        assert claims(meaning) == {"victim": "22/tcp"}
        assert [(one.code, one.file.rpartition("/")[2]) for one in meaning.problems] == [
            ("pod-claimed-twice", "attacker")
        ]
        assert meaning.contested == {}
    with start() as asked:
        assert claims(asked.meaning) == {"victim": "22/tcp"}
        vmis.remove("victim")
        asked.has("attacker")
    shared = pod_uid()
    for name in ("one", "two"):
        vmis.make(instance(name, node, pods={shared: node}))
    with start() as asked:  # both are new to it
        assert machines(asked.meaning) == ["attacker"]
        assert list(asked.meaning.contested) == [f"pod:{shared}"]


# ----------------------------------------------------------------------------------- migration


def test_a_migration_is_followed_from_both_sides(
    vmis: Machines, node: str, start: Start, tmp_path: Path
) -> None:
    """As virt-controller and the two virt-handlers write it."""
    other = unused_name()
    source_pod, target_pod = pod_uid(), pod_uid()
    credentials = load(str(vmis.cluster.kubeconfig("portranger")), {})
    with start() as here, asking(credentials, other, tmp_path / "there") as there:
        vmis.make(instance("web", node, pods={source_pod: node}))
        here.has("web")
        vmis.change("web", {"status": {"activePods": {target_pod: other}}})
        vmis.label("web", target=other)
        there.has("web")
        assert pods(there.meaning) == {target_pod}
        assert pods(here.meaning) == {source_pod}
        for change in ({"node": other}, {"target": None}):
            vmis.label("web", **change)
            for _ in range(5):
                there.turn(0.05)
                assert pods(there.meaning) == {target_pod}
        here.has()
        vmis.change("web", {"status": {"activePods": {source_pod: None}}})
        while there.turn():
            assert pods(there.meaning) == {target_pod}
        vmis.remove("web")
        there.has()


def test_of_a_pod_that_came_back_both_places_are_kept(
    vmis: Machines, node: str, asked: Asked
) -> None:
    """KubeVirt goes on listing the pods that an instance has left."""
    both = {pod_uid(): node, pod_uid(): node}
    vmis.make(instance("web", node, pods=both))
    asked.until(lambda it: pods(it) == both.keys())


# ------------------------------------------------------------------------------------ troubles


def test_an_api_server_that_goes_away_and_comes_back_changes_nothing(
    vmis: Machines, node: str, start: Start
) -> None:
    cluster = vmis.cluster
    with start() as asked:
        vmis.make(instance("web", node))
        before = asked.has("web")
        cluster.kill_apiserver()
        told = f"{cluster.server} cannot be reached: Connection refused (since 20"
        assert eventually(lambda: all("refused" in str(one.trouble) for one in followers(asked)))
        away = asked.until(lambda it: it.unreadable.startswith(told) and ";" not in it.unreadable)
        assert away.machines == before.machines
        while asked.turn(0):
            pass
        assert not asked.turn(0.5)  # as often as it tries, that is no news
    with start() as asked:  # which never hears from it
        assert asked.meaning.machines == before.machines
        assert "Connection refused" in asked.meaning.unreadable
        cluster.start_apiserver()
        assert asked.has("web").machines == before.machines
        vmis.annotate("web", port_ranges="23")
        asked.until(lambda it: claims(it) == {"web": "23/tcp"})
        assert followers(asked)[0].listener.lists == 1


def test_what_happened_while_we_were_cut_off_is_made_up_for(
    vmis: Machines, node: str, tmp_path: Path
) -> None:
    for name in ("kept", "edited", "deleted"):
        vmis.make(instance(name, node))
    with Cable(vmis.cluster).laid() as cable, asking(through(cable), node, tmp_path) as asked:
        before = asked.has("kept", "edited", "deleted")
        for forgotten in (False, True):
            cable.cut()
            asked.until(lambda it: it.unreadable)
            assert asked.meaning.machines == before.machines
            if forgotten:
                vmis.cluster.compact()
            vmis.annotate("edited", port_ranges="24" if forgotten else "23")
            vmis.remove("deleted")
            vmis.make(instance("new" if not forgotten else "newer", node))
            cable.mend()
            names = ("kept", "edited", "new", *(["newer"] if forgotten else []))
            after = asked.has(*names)
            assert claims(after)["edited"] == ("24/tcp" if forgotten else "23/tcp")
            if forgotten:
                assert any(one.listener.lists > 1 for one in followers(asked))
            else:  # the watches went on where they were; the server may have forgotten for one
                assert any(one.listener.lists == 1 for one in followers(asked))
            if not forgotten:
                vmis.make(instance("deleted", node))
                before = asked.has(*names, "deleted")


def test_what_is_stored_is_dropped_only_by_a_whole_list(
    vmis: Machines, node: str, start: Start
) -> None:
    with start() as asked:
        vmis.make(instance("web", node))
        asked.has("web")
    vmis.remove("web")
    vmis.cluster.kill_apiserver()
    with start() as asked:
        assert machines(asked.meaning) == ["web"]
        vmis.cluster.start_apiserver()
        asked.has()
    with start() as asked:
        assert asked.source.namespaces == frozenset()


def test_a_right_that_is_missing_is_named(vmis: Machines, node: str, start: Start) -> None:
    cluster = vmis.cluster
    with start() as asked:
        vmis.make(instance("web", node))
        before = asked.has("web")
    cluster.grant("portranger")
    try:
        with start() as asked:
            assert asked.meaning.machines == before.machines
            told = asked.meaning.unreadable
            assert "cannot list resource" in told
            assert "Let the agent's service account list virtualmachineinstances" in told
            cluster.grant("portranger", {**RIGHTS, "verbs": ["list"]})
            told = asked.until(lambda it: "watch resource" in it.unreadable, 60).unreadable
            assert "service account watch virtualmachineinstances" in told
            cluster.grant("portranger", RIGHTS)
            asked.until(lambda it: not it.unreadable, 60)
            assert asked.meaning.machines == before.machines
    finally:
        cluster.grant("portranger", RIGHTS)


def test_a_token_is_replaced_while_we_run(vmis: Machines, node: str, tmp_path: Path) -> None:
    cluster = vmis.cluster
    file = tmp_path / "token"
    file.write_text(cluster.issue_token("portranger", "rotated"))
    cluster.grant("portranger/rotated", RIGHTS)
    vmis.make(instance("web", node))
    with (
        Cable(cluster).laid() as cable,
        asking(through(cable, Material(path=str(file))), node, tmp_path / "state") as asked,
    ):
        asked.has("web")
        cluster.ask("DELETE", "/api/v1/namespaces/portranger/serviceaccounts/rotated")
        new = cluster.issue_token("portranger", "rotated")  # the old one is of no use now
        assert eventually(lambda: _is_refused(cluster, file.read_text()), 60)  # it has a cache
        cable.cut()
        cable.mend()
        told = asked.until(lambda it: "does not know us" in it.unreadable).unreadable
        assert "Check the token" in told
        assert machines(asked.meaning) == ["web"]
        file.write_text(new)
        asked.has("web")
        vmis.annotate("web", port_ranges="23")
        asked.until(lambda it: claims(it) == {"web": "23/tcp"})


def followers(asked: Asked) -> list[Follower]:
    return asked.source._followers


def _is_refused(cluster: Cluster, token: str) -> bool:
    cluster.tokens["old"] = token
    return cluster.request("GET", "/api", user="old")[0] == 401


def through(cable: Cable, token: Material | None = None) -> Credentials:
    """Credentials that lead over a cable."""
    cluster = cable.cluster
    return Credentials(
        endpoint(f"https://{LOOPBACK}:{cable.port}"),
        Plain(token or Material(text=cluster.tokens["portranger"])),
        authority=Material(path=str(cluster.ca)),
    )


# ------------------------------------------------------------------------------------- numbers


def test_many_instances_at_once_are_read_in_a_few_looks(
    vmis: Machines, node: str, asked: Asked
) -> None:
    names = [f"vm-{number}" for number in range(300)]
    looks, asked.beats = asked.looks, 0
    made: list[float] = []
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(vmis.make_all, [instance(name, node) for name in names])
        making.add_done_callback(lambda _: made.append(time.monotonic()))
        asked.has(*names)
    late = time.monotonic() - made[0]
    took = f"made in {made[0] - began:.2f} s, known {late:.3f} s later"
    print(f"{took}, in {asked.looks - looks} looks")  # noqa: T201 - shown with -s
    assert asked.looks - looks <= 100
    assert asked.beats == 300


MEMORY = """
import gc, json, sys
from agent.sources.kubeconfig import load
from agent.sources.kubernetes import Cluster
from agent.sources.store import Store

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4

kubeconfig, node, state, count = sys.argv[1:]
before = rss()
source = Cluster(load(kubeconfig, {}), node, Store(state, print))
meaning = source.look()
source.remember()
assert len(meaning.machines) == int(count), meaning
peak = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
told = {"before": before, "after": rss(), "peak": peak}
print(json.dumps({**told, "received": source.received, "requests": source.requests}))
source.close()
"""


def test_two_hundred_real_instances_take_little_memory(
    vmis: Machines, node: str, tmp_path: Path
) -> None:
    vmis.make_all([realistic(f"vm-{number}", node) for number in range(200)])
    kubeconfig = vmis.cluster.kubeconfig("portranger")
    done = run(sys.executable, "-c", MEMORY, kubeconfig, node, tmp_path / "state", "200")
    told = json.loads(done.stdout)
    print(told)  # noqa: T201 - shown with -s
    assert told["received"] > 200 * 25_000
    assert told["requests"] <= 4
    assert told["after"] - told["before"] < 20 << 10
    assert told["peak"] - told["before"] < 60 << 10
