"""What a source leaves to the one that takes its place at a reload, while the new one cannot read
anything, and once it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.sources import kubernetes
from agent.sources.credentials import Credentials, Plain, endpoint
from agent.sources.directory import Directory
from agent.sources.handover import Handover
from agent.sources.kubernetes import Cluster
from agent.sources.meaning import Meaning, Source
from agent.sources.parties import PODS
from agent.sources.policies import PATH as POLICIES
from agent.sources.services import PATH as SERVICES
from agent.sources.slices import PATH as SLICES
from agent.sources.store import Store
from agent.sources.vmis import PATH as VMIS
from agent.sources.watch import Watch
from tests.answering import Answer, answering, refused
from tests.scripted import Script
from tests.spaces import eventually, manifest
from tests.unit.test_lawful import CLIENTS, NODE, a_pod, machine, policy
from tests.unit.test_services_followed import READY, back, service, slice_of

Json = Any
BAD = "portranger.io/port-ranges"


class Refusing(list[Answer]):
    """Refuses for as long as it is there."""

    def pop(self, _: Any = 0) -> Answer:
        return self[0]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "FIRST", 0.3)


@pytest.fixture
def script() -> Iterator[Script]:
    closed = machine("closed")
    closed["metadata"]["annotations"][BAD] = "2000-1000"
    closed["status"]["activePods"] = {"22222222-2222-3333-4444-555555555555": NODE}
    lists = {
        VMIS: [machine(), closed],
        SERVICES: [service(), service("bad")],
        SLICES: [
            slice_of(back("10.0.0.1", **READY)),
            slice_of(back("10.0.0.2", **READY), of="bad", name="bad-1"),
        ],
        POLICIES: [policy("web", CLIENTS), policy("shut", podSelector={"matchLabels": {"a": [1]}})],
        PODS: [a_pod()],
    }
    with answering() as server:
        yield Script(server, lists)


def cluster(
    script: Script, state: Path, left: Handover | None = None, *, policies: bool = True
) -> Cluster:
    credentials = Credentials(endpoint(script.server.url), Plain())
    store = Store(str(state), lambda _: None)
    return Cluster(credentials, NODE, store, left=left, services=True, policies=policies)


def directory(path: Path, state: Path, left: Handover | None = None) -> Directory:
    store = Store(str(state), print)
    return Directory(str(path), store, Watch(str(path)), left=left)


def unwritable(folder: Path) -> Path:
    (folder / "state").mkdir()
    (folder / "state" / "last-good").write_text("no directory")
    return folder / "state"


def handed(source: Source) -> Handover:
    return Handover(meaning=source.meaning, texts=source.texts())


def known(source: Cluster) -> Meaning:
    def is_known() -> bool:
        found = source.look()
        return not (found.unreadable or found.services_unknown or found.laws_unknown)

    assert eventually(is_known)
    source.remember()
    return source.meaning


def declared(meaning: Meaning) -> tuple[object, ...]:
    return (
        meaning.machines,
        meaning.services,
        meaning.endpoints,
        meaning.laws,
        sorted(map(str, meaning.problems)),
        set(meaning.held),
        set(meaning.shut),
        meaning.instances,
    )


def turn_bad(script: Script) -> None:
    """Of what is listed some cannot be understood any more."""
    script.lists[VMIS][0]["metadata"]["annotations"][BAD] = "2000-1000"
    script.lists[SERVICES][1] = service("bad", end="nonsense")
    script.lists[POLICIES][0]["spec"]["podSelector"] = {"matchLabels": {"app": ["x"]}}


def test_a_new_source_declares_what_the_old_one_did_until_the_server_answers(
    script: Script, tmp_path: Path
) -> None:
    state = unwritable(tmp_path)
    with closing(cluster(script, state)) as first:
        before = known(first)
        assert len(before.machines) == 2
        assert len(before.shut) == 2
        assert before.endpoints
        for path in script.lists:
            script.refusals[path] = Refusing([refused(503)])
        left = handed(first)
    for _ in range(2):
        with closing(cluster(script, state, left)) as second:
            second.renew()
            found = second.look()
            assert found.unreadable
            assert (found.services_unknown, found.laws_unknown) == ("", "")
            assert found.services_away
            assert found.laws_away
            assert declared(found) == declared(before)
            left = handed(second)
    turn_bad(script)
    script.refusals.clear()
    with closing(cluster(script, state, left)) as third:
        found = known(third)
        label = "VirtualMachineInstance/ns/vm"
        assert {label, "Service/ns/bad", "NetworkPolicy/ns/web"} == set(found.held)
        assert found.machines == before.machines
        assert set(found.services) == set(before.services)
        assert found.laws == before.laws


def test_what_was_deleted_while_the_server_was_away_does_not_come_back(
    script: Script, tmp_path: Path
) -> None:
    with closing(cluster(script, tmp_path)) as first:
        known(first)
        left = handed(first)
    script.lists |= {VMIS: [], SERVICES: [], POLICIES: []}
    with closing(cluster(script, tmp_path, left)) as second:
        found = known(second)
        assert (found.machines, found.services, found.laws.policies) == ((), (), ())
        assert not found.problems


def test_policies_that_the_old_source_never_asked_for_are_not_known(
    script: Script, tmp_path: Path
) -> None:
    with closing(cluster(script, tmp_path, policies=False)) as first:
        first.look()
        left = Handover(meaning=first.meaning, texts=first.texts(), enforced=False)
    script.refusals[POLICIES] = Refusing([refused(403)])
    with closing(cluster(script, tmp_path, left)) as second:
        assert second.look().laws_unknown


def test_a_directory_that_is_away_declares_what_the_source_before_it_did(
    script: Script, tmp_path: Path
) -> None:
    state = unwritable(tmp_path)
    with closing(cluster(script, state)) as first:
        before = known(first)
        with closing(directory(tmp_path / "away", state, handed(first))) as files:
            found = files.look()
            assert found.unreadable
            assert found.machines == before.machines
            assert found.laws == before.laws
            assert found.services_unknown  # so that what is published stays
            script.refusals[VMIS] = Refusing([refused(503)])
            with closing(cluster(script, state, handed(files))) as back:
                assert back.look().machines == before.machines
            (tmp_path / "away").mkdir()
            files.renew()
            found = files.look()
            assert (found.unreadable, found.machines, found.laws.policies) == ("", (), ())
            assert not files.texts()


@pytest.mark.parametrize("state", [unwritable, lambda folder: folder / "state"])
def test_another_directory_that_is_away_declares_what_the_first_did(
    tmp_path: Path, state: Callable[[Path], Path]
) -> None:
    kept = state(tmp_path)
    here = tmp_path / "here"
    here.mkdir()
    (here / "vm.yaml").write_text(manifest("vm", "22"))
    with closing(directory(here, kept)) as first:
        first.look()
        first.remember()
        assert len(first.meaning.machines) == 1
        left = handed(first)
    with closing(directory(tmp_path / "away", kept, left)) as second:
        assert second.look().machines == first.meaning.machines
