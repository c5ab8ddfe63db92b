"""What Services and policies last meant outlives the agent: written down bit by bit, used only for
the very object that is there and bad, and gone with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.sources import policies, services
from agent.sources.directory import Directory
from agent.sources.instances import Instances
from agent.sources.readings import Readings, texts_of
from agent.sources.store import Texts
from agent.sources.told import Told
from agent.sources.vmis import recalled
from agent.sources.watch import Watch
from rules.policies import NetworkPolicy
from rules.services import Service
from tests.unit import test_store

Json = Any
END = "portrange.alpha.kubernetes.io/port-end-rtp"
WEB, OPEN, SIP = "NetworkPolicy/ns/web", "NetworkPolicy/ns/open", "Service/ns/sip"


class Kept(test_store.Kept):
    """With what is read from it."""

    def load(self) -> dict[str, str]:
        return self.open().load()

    def policies(self) -> Readings[NetworkPolicy]:
        """Those of a new run."""
        store = self.open()
        texts = texts_of(policies.KIND, store, store.load())
        return Readings(policies.heard, policies.understood, policies.closed, texts)

    def services(self) -> Readings[Service | None]:
        store = self.open()
        texts = texts_of(services.KIND, store, store.load())
        return Readings(
            services.heard,
            services.understood,
            lambda _: None,
            texts,
            lambda told: told.annotated,
        )

    def path(self, label: str) -> Path:
        """Where something of it is stored."""
        store = self.open()
        assert label in store.load()
        return store._path(label)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "state")


def policy(
    cidr: str = "192.0.2.0/24", *, name: str = "web", uid: str = "u", version: int = 1
) -> Told:
    document: Json = {
        "kind": policies.KIND,
        "metadata": {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": str(version)},
        "spec": {"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": cidr}}]}]},
    }
    found = policies.heard(policies.trimmed(document))
    assert found
    return found


def service(end: str | None = "10004", *, uid: str = "u") -> Told:
    port = {"name": "rtp", "protocol": "UDP", "port": 10000, "nodePort": 30000}
    document: Json = {
        "kind": services.KIND,
        "metadata": {
            "namespace": "ns",
            "name": "sip",
            "uid": uid,
            "annotations": {END: end} if end else {},
        },
        "spec": {"type": "NodePort", "ports": [port]},
    }
    found = services.heard(services.trimmed(document))
    assert found
    return found


def bad(*, uid: str = "u", version: int = 1) -> Told:
    return policy("010.0.0.0/8", uid=uid, version=version)


def look(readings: Readings[Any], *seen: Told) -> None:
    """At these, and write down what there is to be written down."""
    readings.look(seen, lambda: None, anew=False)
    assert readings.remember(lambda: None, lambda: False)


def allowed(readings: Readings[NetworkPolicy]) -> list[str]:
    """The networks that are let in."""
    return [
        str(getattr(peer, "network", peer))
        for _, one in readings.meant
        for rule in one.ingress or ()
        for peer in rule.peers or ()
    ]


def ranged(readings: Readings[Service | None]) -> list[str]:
    return [str(port.ports) for _, one in readings.meant if one for port in one.ports]


# --------------------------------------------------------------------------- what it last meant


def test_what_is_bad_after_a_restart_means_what_it_last_meant(kept: Kept) -> None:
    look(kept.policies(), policy())
    look(kept.services(), service())
    for _ in range(2):  # also after a second one
        laws = kept.policies()
        look(laws, bad())
        assert (laws.held, laws.lost, len(laws.problems)) == ((WEB,), (), 1)
        assert allowed(laws) == ["192.0.2.0/24"]
        published = kept.services()
        look(published, service("9"))
        assert (published.held, ranged(published)) == ((SIP,), ["10000-10004"])
    assert kept.warnings == []


def test_what_was_held_when_it_ended_is_held_again(kept: Kept) -> None:
    laws = kept.policies()
    for told in (policy(), policy("198.51.100.0/24"), bad()):
        look(laws, told)
    laws = kept.policies()
    look(laws, bad(version=2))
    assert allowed(laws) == ["198.51.100.0/24"]


def test_what_is_in_order_means_what_it_says(kept: Kept) -> None:
    look(kept.policies(), policy())
    laws = kept.policies()
    look(laws, policy("198.51.100.0/24"))
    assert (laws.held, allowed(laws)) == ((), ["198.51.100.0/24"])


def test_another_of_the_same_name_has_no_past(kept: Kept) -> None:
    look(kept.policies(), policy())
    look(kept.services(), service())
    laws, published = kept.policies(), kept.services()
    look(laws, bad(uid="another"))
    look(published, service("9", uid="another"))
    assert (laws.held, laws.lost, allowed(laws)) == ((), (WEB,), [])
    assert (published.held, ranged(published)) == ((), [])
    assert kept.load() == {}, "nor does it come back"


def test_what_is_gone_is_gone(kept: Kept) -> None:
    look(kept.policies(), policy(), policy(name="open"))
    look(kept.policies(), policy(name="open"))
    assert list(kept.load()) == [OPEN]
    laws = kept.policies()
    look(laws)
    assert (laws.meant, kept.load()) == ([], {})


def test_nothing_is_dropped_before_all_is_known(kept: Kept) -> None:
    look(kept.policies(), policy())
    laws = kept.policies()
    assert laws.remember(lambda: None, lambda: False)
    assert laws.meant == []
    assert list(kept.load()) == [WEB]


def test_only_services_with_an_annotation_of_ours_are_stored(kept: Kept) -> None:
    """A cluster has thousands of others."""
    published = kept.services()
    look(published, service(None))
    assert kept.load() == {}
    look(published, service("9"))  # it was no range before
    published = kept.services()
    look(published, service("9"))
    assert (published.held, ranged(published)) == ((SIP,), ["10000"])
    look(published, service())
    look(published, service(None))
    assert kept.load() == {}


# ------------------------------------------------------------------------------- on the disk


def test_what_is_the_same_is_not_written_again(kept: Kept) -> None:
    look(kept.policies(), policy())
    before = kept.path(WEB).stat()
    laws = kept.policies()
    look(laws, policy(version=2))
    look(laws, policy(version=3))
    look(laws, bad())
    assert kept.path(WEB).stat() == before
    look(laws, policy("198.51.100.0/24"))
    assert kept.path(WEB).stat().st_ino != before.st_ino


def test_what_is_corrupt_is_set_aside_and_nothing_is_made_of_it(kept: Kept) -> None:
    look(kept.policies(), policy())
    path = kept.path(WEB)
    path.write_text(path.read_text().replace("192.0.2.0", "192.0.3.0"))
    laws = kept.policies()
    look(laws, bad())
    assert (laws.lost, allowed(laws)) == ((WEB,), [])
    assert f"setting {path} aside" in kept.warnings[0]
    look(laws, policy())
    assert list(kept.load()) == [WEB]
    assert len(kept.warnings) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"NetworkPolicy":',
        '{"NetworkPolicy":[]}',
        '{"NetworkPolicy":{}}',
        '{"NetworkPolicy":' + '{"a":' * 50_000,
        policy(name="open").text,
        f'{{"NetworkPolicy":{policy(name="open").text}}}',
        f'{{"NetworkPolicy":{bad().text}}}',
        f'{{"Service":{policy().text}}}',
    ],
)
def test_what_is_no_last_good_text_of_it_is_none(kept: Kept, text: str) -> None:
    kept.open().keep(WEB, text)
    laws = kept.policies()
    look(laws, bad())
    assert (laws.lost, allowed(laws)) == ((WEB,), [])


# ---------------------------------------------------------------------------------- bit by bit


class Storing:
    """Whoever stores texts, and is told when it is enough."""

    def __init__(self, kept: Kept) -> None:
        store = kept.open()
        self.texts: Texts[str] = Texts(store, store.load(), str)
        self.beats = 0

    def remember(self, wanted: Mapping[str, str], most: int = 100) -> bool:
        until = self.beats + most
        return self.texts.remember(wanted, self._beat, lambda: self.beats >= until)

    def _beat(self) -> None:
        self.beats += 1


def test_it_is_written_down_in_slices(kept: Kept) -> None:
    wanted = {f"label {number}": str(number) for number in range(5)}
    storing = Storing(kept)
    for stored in (2, 4):
        assert not storing.remember(wanted, most=2)
        assert len(kept.load()) == stored
    assert storing.remember(wanted, most=2)
    assert kept.load() == wanted
    assert storing.beats == len(wanted)
    assert storing.remember(wanted)
    assert storing.beats == len(wanted)


def test_what_the_run_before_left_is_compared_in_slices_too(kept: Kept) -> None:
    wanted = {f"label {number}": str(number) for number in range(5)}
    assert Storing(kept).remember(wanted)
    storing = Storing(kept)
    assert not storing.remember(wanted, most=3)
    assert len(storing.texts.earlier) == 2
    assert storing.remember(wanted | {"label 4": "new"}, most=3)
    assert kept.load() == wanted | {"label 4": "new"}


def test_what_cannot_be_written_is_tried_again_without_haste(kept: Kept) -> None:
    kept.folder.write_text("in the way")
    wanted = {"one": "1", "two": "2"}
    storing = Storing(kept)
    assert storing.remember(wanted, most=0), "at once would be in vain"
    assert storing.remember(wanted)
    assert (storing.beats, kept.load()) == (0, {})
    kept.folder.unlink()
    assert storing.remember(wanted)
    assert kept.load() == {}
    kept.now += 60  # the longest that it waits
    assert storing.remember(wanted)
    assert kept.load() == wanted


def test_what_could_not_be_replaced_is_written_when_it_is_wanted_again(kept: Kept) -> None:
    storing = Storing(kept)
    assert storing.remember({"one": "1"})
    scratch = Path(f"{kept.path('one')}.new")
    scratch.mkdir()
    assert storing.remember({"one": "2"})
    assert kept.load() == {}
    scratch.rmdir()
    assert storing.remember({"one": "1"})
    assert kept.load() == {"one": "1"}


# ------------------------------------------------------------------- among what others stored


def test_where_they_are_not_asked_for_they_are_nothing_and_go(kept: Kept) -> None:
    """Somebody has switched off what was stored for."""
    look(kept.policies(), policy())
    look(kept.services(), service())
    store = kept.open()
    earlier = store.load()
    assert [recalled(text) for text in earlier.values()] == [None, None]
    instances = Instances("node", store, earlier, lambda _: "", lambda: None)
    assert (instances.namespaces, instances.recalled) == (frozenset(), {})
    assert instances.look({}, lambda: None, unreadable="", anew=False).machines == ()
    assert instances.remember(lambda: None, lambda: False)
    assert (kept.load(), kept.warnings) == ({}, [])


def test_to_a_directory_of_manifests_they_are_nothing_and_go(kept: Kept, tmp_path: Path) -> None:
    """Somebody has changed `source` from kubernetes to files."""
    look(kept.policies(), policy())
    look(kept.services(), service())
    manifests = tmp_path / "manifests"
    directory = Directory(str(manifests), kept.open(), Watch(str(manifests)))
    try:
        away = directory.look()
        assert away.unreadable
        assert (away.machines, away.services, away.laws.policies) == ((), (), ())
        assert directory.namespaces == frozenset()
        assert len(kept.load()) == 2
        manifests.mkdir()
        assert not directory.read().unreadable
        directory.remember()
    finally:
        directory.close()
    assert (kept.load(), kept.warnings) == ({}, [])


def test_each_kind_takes_its_own_and_leaves_the_rest(kept: Kept) -> None:
    look(kept.policies(), policy())
    look(kept.services(), service())
    kept.open().keep("VirtualMachineInstance/ns/vm", '{"instance":{}}')
    store = kept.open()
    earlier = store.load()
    assert list(texts_of(policies.KIND, store, earlier).earlier) == [WEB]
    assert list(texts_of(services.KIND, store, earlier).earlier) == [SIP]
    assert list(earlier) == ["VirtualMachineInstance/ns/vm"]
