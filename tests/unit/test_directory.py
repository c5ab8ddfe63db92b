"""A directory of manifests in view: only what changed is read, nobody reads half a file, and what
cannot be read keeps its last good meaning."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.sources.directory import Directory
from agent.sources.meaning import Meaning
from agent.sources.store import Store
from agent.sources.watch import PATIENCE, Watch, way
from rules.policies import NetworkPolicy
from tests.spaces import manifest

BAD = "kind: ["
SERVICE = """\
---
apiVersion: v1
kind: Service
metadata: {name: %s}
spec:
  selector: {app: web}
  ports: [{port: %s}]
"""


POLICY = """\
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: %s}
spec:
  podSelector: {}
  ingress: [{ports: [{port: %s}]}]
"""
PARTIES = """\
---
apiVersion: v1
kind: Pod
metadata: {name: a}
spec: {containers: []}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {team: a}}
"""


class Seen:
    """A directory, who watches it, and a clock that stands still unless told."""

    def __init__(self, path: Path, state: Path) -> None:
        self.path, self.state = path, state
        self.now = 1000.0
        self.beats = 0
        self.warnings: list[str] = []
        self.watch = Watch(str(path), lambda: self.now)
        self.restart()

    def restart(self) -> None:
        self.store = Store(str(self.state), self.warnings.append)
        self.directory = Directory(str(self.path), self.store, self.watch)

    def read(self) -> Meaning:
        """As the daemon does when it is woken."""
        self.beats = 0
        meaning = self.directory.read(self.watch.stirred(), self._beat)
        self.directory.remember()
        self.store.report()
        return meaning

    def _beat(self) -> None:
        self.beats += 1

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(text)
        return path

    def woken(self) -> bool:
        return bool(select.select([self.watch.fileno()], [], [], 0)[0])


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Seen]:
    (tmp_path / "m").mkdir()
    made = Seen(tmp_path / "m", tmp_path / "state")
    yield made
    made.watch.close()


def names(meaning: Meaning) -> list[str]:
    return sorted(machine.name for machine in meaning.machines)


def service(name: str = "web", port: str = "80") -> str:
    return SERVICE % (name, port)


def published(meaning: Meaning) -> list[str]:
    """The Services, each with its port."""
    return [f"{one.name} {one.ports[0].ports}" for one in meaning.services]


def codes(meaning: Meaning) -> list[str]:
    return sorted(problem.code for problem in meaning.problems)


# ------------------------------------------------------------------------- what is read


def test_what_is_there_is_read_in_order(seen: Seen) -> None:
    seen.write("b.yaml", manifest("blue", "22", "b"))
    seen.write("a.yml", manifest("blue", "23", "a") + "---\nkind: Secret\napiVersion: v1\n")
    seen.write("c.txt", manifest("blue", "24", "c"))
    seen.write(".d.yaml", manifest("blue", "25", "d"))
    meaning = seen.read()
    assert [machine.name for machine in meaning.machines] == ["a", "b"]
    assert meaning.count == 2
    assert len(meaning.skipped) == 1
    assert not meaning.problems
    assert not meaning.unreadable


def test_only_what_changed_is_read_again(seen: Seen) -> None:
    for number in range(20):
        seen.write(f"{number}.yaml", manifest("blue", str(100 + number), f"vm-{number}"))
    assert len(seen.read().machines) == 20
    assert seen.beats == 20
    seen.write("7.yaml", manifest("blue", "7", "vm-7"))
    assert "first=7," in str(seen.read().machines)
    assert seen.beats == 1
    seen.read()
    assert seen.beats == 0


def test_what_was_touched_and_says_the_same_is_the_same(seen: Seen) -> None:
    path = seen.write("a.yaml", manifest("blue", "22"))
    before = seen.read()
    os.utime(path)
    after = seen.read()
    assert after.machines[0] is before.machines[0]


def test_a_change_that_keeps_size_and_time_is_read_where_it_is_told(seen: Seen) -> None:
    path = seen.write("a.yaml", manifest("blue", "22"))
    seen.read()
    before = path.stat()
    path.write_text(manifest("blue", "23"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "first=23" in str(seen.read().machines)


def test_a_file_that_went_is_gone(seen: Seen) -> None:
    path = seen.write("a.yaml", manifest("blue", "22"))
    seen.read()
    path.unlink()
    assert seen.woken()
    assert seen.read() == Meaning(files={})


@pytest.mark.parametrize("target", ["odd.yaml", "nowhere", "/etc/passwd/x", "/dev/zero"])
def test_a_link_that_leads_nowhere_is_one_bad_file_and_no_more(seen: Seen, target: str) -> None:
    (seen.path / "odd.yaml").symlink_to(target)
    seen.write("a.yaml", manifest("blue", "22"))
    meaning = seen.read()
    assert names(meaning) == ["desktop"]
    assert codes(meaning) == ["unreadable"]
    assert not meaning.unreadable


# ------------------------------------------------------------------------- last good meaning


def test_what_turns_bad_goes_on_and_what_never_was_good_is_unknown(seen: Seen) -> None:
    path = seen.write("a.yaml", manifest("blue", "22"))
    new = seen.path / "b.yaml"
    before = seen.read()
    for text in (BAD, "", "\n", manifest("blue", "22").replace("start: 22", "start: 0")):
        path.write_text(text)
        new.write_text(text)
        meaning = seen.read()
        assert meaning.machines == before.machines
        assert meaning.held == (str(path),)
        assert meaning.unknown == (str(new),)
        assert {problem.file for problem in meaning.problems} == {str(path), str(new)}
    path.write_text(manifest("blue", "23"))
    new.unlink()
    assert seen.read().held == ()


def test_the_last_good_meaning_is_found_again_by_the_next_run(seen: Seen) -> None:
    path = seen.write("a.yaml", manifest("blue", "22"))
    gone = seen.write("b.yaml", manifest("red", "80", "other"))
    before = seen.read()
    path.write_text(BAD)
    gone.unlink()
    seen.restart()
    assert seen.directory.namespaces == {"blue", "red"}
    meaning = seen.read()
    assert meaning.machines == before.machines[:1]
    assert meaning.held == (str(path),)
    seen.restart()
    assert seen.directory.namespaces == {"blue"}
    assert seen.warnings == []


def test_files_whose_names_are_in_no_encoding_are_as_many_as_they_are(seen: Seen) -> None:
    for name, netns in ((b"vm-\xe4.yaml", "blue"), (b"vm-\xf6.yaml", "red")):
        seen.write(os.fsdecode(name), manifest(netns, "22", netns))
    assert {machine.netns for machine in seen.read().machines} == {"blue", "red"}
    for name in (b"vm-\xe4.yaml", b"vm-\xf6.yaml"):
        seen.write(os.fsdecode(name), BAD)
    seen.restart()
    assert {machine.netns for machine in seen.read().machines} == {"blue", "red"}


def test_what_could_not_be_stored_is_stored_when_it_can_be(seen: Seen) -> None:
    """Also where the file says by then what it said before."""
    path = seen.write("a.yaml", manifest("blue", "22"))
    before = seen.read()
    (stored,) = (seen.state / "last-good").iterdir()
    in_the_way = Path(f"{stored}.new")
    in_the_way.mkdir()
    seen.write("a.yaml", manifest("blue", "23"))
    seen.read()
    assert "cannot write" in seen.warnings[0]
    in_the_way.rmdir()
    seen.write("a.yaml", manifest("blue", "22"))
    seen.read()
    path.write_text(BAD)
    seen.restart()
    assert seen.read().machines == before.machines


def test_what_is_in_conflict_is_not_remembered(seen: Seen) -> None:
    seen.write("a.yaml", manifest("blue", "22", "one"))
    seen.read()
    seen.write("b.yaml", manifest("blue", "22", "two"))
    for _ in range(2):
        meaning = seen.read()
        assert names(meaning) == ["one"]
        assert codes(meaning) == ["conflict"]
        assert list(meaning.contested) == ["blue"]
        assert [Path(file).name for file in meaning.unknown] == ["b.yaml"]
        seen.restart()


def test_services_are_read_with_their_place(seen: Seen) -> None:
    seen.write("b.yaml", service("b"))
    path = seen.write("a.yaml", manifest("blue", "22") + service("a", "81"))
    meaning = seen.read()
    assert published(meaning) == ["a 81", "b 80"]
    line = manifest("blue", "22").count("\n") + 2
    assert meaning.services[0].origin == f"{path}:{line}"
    assert meaning.endpoints is None
    assert (meaning.count, meaning.skipped, meaning.problems) == (3, (), ())
    assert seen.read().services[0] is meaning.services[0]
    path.unlink()
    assert published(seen.read()) == ["b 80"]


@pytest.mark.parametrize(
    "text",
    [
        BAD,
        manifest("blue", "22").replace("start: 22", "start: 0") + service("web", "81"),
        manifest("blue", "23") + service("web", "0"),
    ],
    ids=["text", "machine", "service"],
)
def test_machines_and_services_of_a_file_go_on_together(seen: Seen, text: str) -> None:
    path = seen.write("a.yaml", manifest("blue", "22") + service())
    before = seen.read()
    path.write_text(text)
    for _ in range(2):
        meaning = seen.read()
        assert (meaning.machines, meaning.services) == (before.machines, before.services)
        assert meaning.held == (str(path),)
        seen.restart()  # the next run finds them again
    assert seen.directory.namespaces == {"blue"}
    path.write_text(manifest("blue", "23") + service("web", "81"))
    meaning = seen.read()
    assert published(meaning) == ["web 81"]
    assert "first=23" in str(meaning.machines)


def test_a_service_that_is_written_again_stays_where_it_was(seen: Seen) -> None:
    seen.write("b.yaml", service())
    seen.read()
    copy = seen.write("a.yaml", manifest("blue", "22") + service("web", "81"))
    for _ in range(2):
        meaning = seen.read()
        assert published(meaning) == ["web 80"]
        assert meaning.machines == ()
        assert codes(meaning) == ["duplicate-service"]
        assert meaning.unknown == (str(copy),)
        seen.restart()


# ------------------------------------------------------------------------------------- policies


def policy(name: str = "web", port: str = "80") -> str:
    return POLICY % (name, port)


def laws(meaning: Meaning) -> list[str]:
    """What each policy opens for everybody."""
    return sorted(
        f"{one.name} {'broken' if one.broken else port_of(one)}" for one in meaning.laws.policies
    )


def port_of(one: NetworkPolicy) -> str:
    [rule] = one.ingress or ()
    [port] = rule.ports or ()
    return str(port.port)


def test_policies_are_read_with_whom_they_speak_of(seen: Seen) -> None:
    seen.write("a.yaml", manifest("blue", "22") + policy())
    path = seen.write("b.yaml", PARTIES)
    meaning = seen.read()
    assert laws(meaning) == ["web 80"]
    assert [str(one) for one in (*meaning.laws.pods, *meaning.laws.namespaces)] == [
        "Pod/default/a",
        "Namespace/shop",
    ]
    assert meaning.count == 4
    assert not meaning.problems
    path.unlink()
    assert (seen.read().laws.pods, seen.read().laws.namespaces) == ((), ())
    (seen.path / "a.yaml").unlink()
    assert seen.read() == Meaning(files={})


@pytest.mark.parametrize(
    "text",
    [BAD, policy("web", "0"), policy("web", "81") + manifest("blue", "22").replace(": 22", ": 0")],
    ids=["text", "policy", "beside a bad machine"],
)
def test_a_policy_that_turns_bad_goes_on_also_in_the_next_run(seen: Seen, text: str) -> None:
    path = seen.write("a.yaml", policy())
    seen.read()
    path.write_text(text)
    for _ in range(2):
        meaning = seen.read()
        assert laws(meaning) == ["web 80"]
        assert meaning.held == (str(path),)
        seen.restart()
    path.write_text(policy("web", "82"))
    assert laws(seen.read()) == ["web 82"]


def test_a_bad_policy_that_is_new_in_a_file_closes_beside_what_the_file_meant(seen: Seen) -> None:
    """What went on before is for who was there before."""
    path = seen.write("a.yaml", policy("other", "443"))
    assert laws(seen.read()) == ["other 443"]
    path.write_text(policy("other", "444") + policy("web", "0"))
    for _ in range(2):
        meaning = seen.read()
        assert laws(meaning) == ["other 443", "web broken"]
        assert (meaning.held, meaning.shut) == ((str(path),), (str(path),))
        seen.restart()
    path.write_text(policy("other", "444") + policy("web", "80"))
    assert laws(seen.read()) == ["other 444", "web 80"]


@pytest.mark.parametrize(
    "text",
    [policy("web", "0"), policy() + manifest("blue", "22").replace("start: 22", "start: 0")],
    ids=["policy", "beside a bad machine"],
)
def test_a_policy_that_was_never_understood_closes(seen: Seen, text: str) -> None:
    path = seen.write("a.yaml", text)
    seen.write("b.yaml", policy("other", "443"))
    for _ in range(2):
        meaning = seen.read()
        assert laws(meaning) == ["other 443", "web broken"]
        [shut] = [one for one in meaning.laws.policies if one.broken]
        assert (shut.ingress, shut.egress) == ((), None)
        assert meaning.unknown == (str(path),)
        seen.restart()
    path.write_text(policy())
    assert laws(seen.read()) == ["other 443", "web 80"]


def test_of_a_policy_that_is_written_again_the_first_goes_on(seen: Seen) -> None:
    seen.write("b.yaml", policy())
    seen.read()
    copy = seen.write("a.yaml", policy("web", "81"))
    meaning = seen.read()
    assert "web 80" in laws(meaning)
    assert "web 81" not in laws(meaning)
    assert codes(meaning) == ["duplicate-policy"]
    assert meaning.unknown == (str(copy),)


@pytest.mark.parametrize(
    "text", [policy(), manifest("blue", "22", "two") + policy("more")], ids=["twice", "beside"]
)
def test_a_policy_of_files_that_quarrel_closes(seen: Seen, text: str) -> None:
    seen.write("a.yaml", manifest("blue", "22", "one") + policy())
    seen.write("b.yaml", text)
    meaning = seen.read()
    assert meaning.problems
    assert {words.rpartition(" ")[2] for words in laws(meaning)} == {"broken"}


def test_the_labels_of_a_namespace_in_a_file_that_was_never_understood_are_not_known(
    seen: Seen,
) -> None:
    """Else it would be without any, as some policies want those whom they let in."""
    seen.write("a.yaml", PARTIES + service("web", "0"))
    meaning = seen.read()
    assert codes(meaning) == ["port-out-of-range"]
    assert [(one.name, one.labels) for one in meaning.laws.namespaces] == [("shop", None)]


@pytest.mark.parametrize("how", ["moved", "file", "loop"])
def test_a_directory_that_cannot_be_read_changes_nothing(seen: Seen, how: str) -> None:
    seen.write("a.yaml", manifest("blue", "22"))
    before = seen.read()
    away = seen.path.with_name("away")
    seen.path.rename(away)
    if how == "file":
        seen.path.write_text("x")
    elif how == "loop":
        seen.path.symlink_to(seen.path.name)
    for _ in range(2):
        meaning = seen.read()
        assert meaning.machines == before.machines
        assert f"{seen.path} cannot be read: " in meaning.unreadable
        seen.restart()
    seen.path.unlink(missing_ok=True)
    away.rename(seen.path)
    assert seen.woken()
    assert not seen.read().unreadable
    (seen.path / "a.yaml").unlink()
    assert seen.read().machines == ()


# ------------------------------------------------------------------------- writers in the middle


def test_a_file_is_read_when_its_writer_closes_it(seen: Seen) -> None:
    whole = manifest("blue", "22", "one") + "---\n" + manifest("blue", "23", "two")
    half = whole.partition("---\n")[0]
    path = seen.write("a.yaml", whole)
    before = seen.read()
    with path.open("w") as file:
        file.write(half)
        file.flush()
        assert seen.read().machines == before.machines
        assert seen.watch.due == seen.now + PATIENCE
    assert names(seen.read()) == ["one"]
    assert seen.watch.due is None


def test_a_writer_who_begins_while_we_read_is_seen_before_we_believe_it(seen: Seen) -> None:
    """Nothing was heard of it when the reading began."""
    whole = manifest("blue", "22", "one") + "---\n" + manifest("blue", "23", "two")
    path = seen.write("a.yaml", whole)
    before = seen.read()
    with path.open("w") as file:
        file.write(whole.partition("---\n")[0])
        file.flush()
        assert seen.directory.read(set()).machines == before.machines
        assert not seen.woken()
        file.write("---\n" + manifest("blue", "24", "two"))
    assert seen.woken()
    assert "first=24" in str(seen.read().machines)


def test_what_is_heard_while_we_read_is_told_the_next_time(seen: Seen) -> None:
    """Nothing is left to be read then, so only the watch can say that it is due."""
    path = seen.write("a.yaml", manifest("blue", "22"))
    seen.read()
    path.write_text(manifest("blue", "23"))
    seen.watch.hear()
    assert not seen.woken()
    assert seen.watch.due == seen.now
    assert seen.watch.stirred() == {str(path)}
    assert seen.watch.due is None


def test_a_writer_who_never_closes_is_not_waited_for_for_ever(seen: Seen) -> None:
    path = seen.write("a.yaml", manifest("blue", "22"))
    seen.read()
    with path.open("w") as file:
        file.write(manifest("blue", "23"))
        file.flush()
        assert "first=22" in str(seen.read().machines)
        seen.now += PATIENCE
        assert "first=23" in str(seen.read().machines)
        assert seen.watch.due is None


def test_a_file_that_is_none_of_ours_and_never_closed_does_not_keep_us_awake(seen: Seen) -> None:
    """As the swap file of an editor that is open all day."""
    seen.read()
    with (seen.path / ".a.yaml.swp").open("w") as file:
        file.write("swap")
        file.flush()
        seen.read()
        seen.now += PATIENCE
        seen.read()
        assert seen.watch.due is None


# --------------------------------------------------------------------------------------- the watch


def test_a_directory_that_appears_step_by_step_is_seen_at_each(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "m"
    seen = Seen(path, tmp_path / "state")
    try:
        assert seen.read().unreadable
        for step in (path.parent.parent, path.parent, path):
            step.mkdir()
            assert seen.woken()
            seen.read()
        assert not seen.directory.meaning.unreadable
        seen.write("a.yaml", manifest("blue", "22"))
        assert seen.woken()
    finally:
        seen.watch.close()


def test_what_appears_together_with_its_directories_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "m"
    seen = Seen(path, tmp_path / "state")
    try:
        seen.read()
        path.mkdir(parents=True)
        seen.write("a.yaml", manifest("blue", "22"))
        assert names(seen.read()) == ["desktop"]
        seen.write("a.yaml", manifest("blue", "23"))
        assert seen.woken()
    finally:
        seen.watch.close()


def test_what_others_do_on_the_way_to_it_is_none_of_ours(seen: Seen) -> None:
    seen.write("a.yaml", manifest("blue", "22"))
    seen.read()
    (seen.path.parent / "other").mkdir()
    (seen.path.parent / "file.yaml").write_text("x")
    assert seen.watch.stirred() == set()


def test_the_target_of_a_link_is_watched_for_as_long_as_it_is_one(
    seen: Seen, tmp_path: Path
) -> None:
    far, near = tmp_path / "far", tmp_path / "near"
    for folder, port in ((far, "22"), (near, "23")):
        folder.mkdir()
        (folder / "x").write_text(manifest("blue", port))
    entry = seen.path / "a.yaml"
    entry.symlink_to(far / "x")
    seen.read()
    (far / "x").write_text(manifest("blue", "24"))
    assert "first=24" in str(seen.read().machines)
    entry.unlink()
    entry.symlink_to("../near/x")
    assert "first=23" in str(seen.read().machines)
    (far / "x").write_text(manifest("blue", "25"))
    assert seen.watch.stirred() == set()
    (near / "x").write_text(manifest("blue", "26"))
    assert "first=26" in str(seen.read().machines)


def test_more_than_the_kernel_remembers_is_a_reason_to_look_at_all(seen: Seen) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip(f"this kernel remembers {limit} events: to exceed that would take too long")
    seen.read()
    for number in range(limit // 3 + 10):
        path = seen.path / str(number)
        path.touch()  # three events: created, changed in its times, closed
        path.unlink()
    assert seen.watch.stirred() is None


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("/a/b", [("/", "a"), ("/a", "b")]),
        ("//a/./b/", [("/", "a"), ("/a", "b")]),
        ("/a/../b", [("/", "a"), ("/", "b")]),
        ("/", []),
    ],
)
def test_the_way_to_a_path(path: str, steps: list[tuple[str, str]]) -> None:
    assert list(way(path)) == steps


def test_the_way_through_links(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    (tmp_path / "round").symlink_to("round")
    here = str(tmp_path)
    found = list(way(f"{here}/link/x"))
    assert found[-4:] == [
        (here, "link"),
        (here, "real"),
        (f"{here}/real", "deep"),
        (f"{here}/real/deep", "x"),
    ]
    started = time.monotonic()
    assert len(list(way(f"{here}/round/x"))) < 100
    assert time.monotonic() - started < 5
