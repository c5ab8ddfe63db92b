"""The directory of manifests, however it is written to, replaced or broken: what is in the kernel
is what the files say, or said last when they made sense."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests import faulty
from tests.daemon.running import (
    Node,
    Running,
    forwarded,
    handles,
)
from tests.spaces import (
    applied,
    eventually,
    manifest,
    nft,
    observed,
    pod,
    run,
    unused_name,
    vm,
    within,
)

BAD = "kind: VirtualMachine\nmetadata: ["


def link(path: Path, target: str | Path) -> None:
    """Make a link take the name, at once."""
    scratch = path.with_name(f"{path.name}.new")
    scratch.symlink_to(target)
    scratch.replace(path)


def assert_seen(node: Node, daemon: Running, netns: str) -> None:
    """The daemon has seen everything that was done up to now, since it has applied what is done
    now; the other files need not be as it read them."""
    node.save("mark.yaml", f"# {unused_name()}\n{manifest(netns, '65000', 'mark')}")
    assert daemon.applied("mark.yaml")


def comes_to_store(node: Node) -> None:
    """What the next run falls back on is written after it is applied, and nothing tells when."""
    assert eventually(lambda: any((node.state / "last-good").glob("*.json")))


# -------------------------------------------------------------------------------- ways to save


def by_rename(path: Path, text: str) -> None:
    scratch = path.with_name("scratch")
    scratch.write_text(text)
    scratch.replace(path)


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def without_truncating(path: Path, text: str) -> None:
    with path.open("r+") as file:
        file.write(text)
        file.truncate()


def with_a_backup(path: Path, text: str) -> None:
    path.rename(path.with_name(f"{path.name}~"))
    path.write_text(text)
    path.with_name(f"{path.name}~").unlink()


def by_link(path: Path, text: str) -> None:
    scratch = path.with_name("scratch")
    scratch.write_text(text)
    path.unlink()
    path.hardlink_to(scratch)


def by_removing_first(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


SAVES = [by_rename, in_place, without_truncating, with_a_backup, by_link, by_removing_first]
STATES = {"22,8000-8010": ("tcp 22", "tcp 8000-8010"), "8000-8009": ("tcp 8000-8009",)}


def test_a_save_is_in_the_kernel_within_a_moment(node: Node, blue: str) -> None:
    path = node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        assert forwarded(blue) == {"tcp 22"}
        for save in SAVES:
            for ranges, words in STATES.items():
                save(path, manifest(blue, ranges))
                assert daemon.forwarded(blue) == {*words}, f"{save} {ranges}"
        assert daemon.standing(blue)["state"] == "in sync"
        assert not daemon.said("bad manifest")


def test_a_file_that_comes_and_one_that_goes(node: Node, blue: str, red: str) -> None:
    with node.running() as daemon:
        node.save("a.yaml", manifest(blue, "22", "one"))
        node.save("b.json", '{"apiVersion": "v1", "kind": "Secret"}')
        node.save("c.yml", manifest(red, "80", "two"))
        assert daemon.forwarded(blue) == {"tcp 22"}
        assert daemon.forwarded(red) == {"tcp 80"}
        node.remove("a.yaml")
        assert daemon.forwarded(red) == {"tcp 80"}
        assert not observed(blue).table
        assert not daemon.standing(blue)
        assert daemon.said("skipped")


def test_a_file_that_is_renamed_keeps_its_rules_as_they_are(node: Node, blue: str) -> None:
    path = node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        before = handles(blue)
        path.rename(path.with_name("b.yaml"))
        assert daemon.applied()
        assert handles(blue) == before
        assert not daemon.said("drift repaired")


def test_a_machine_that_is_copied_to_another_file_goes_on_when_the_first_is_removed(
    node: Node, blue: str
) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        before = handles(blue)
        node.save("b.yaml", manifest(blue, "22"))
        assert daemon.applied()
        assert daemon.said("bad manifest")
        node.remove("a.yaml")
        assert daemon.applied()
        assert daemon.status()["problems"] == []
        assert handles(blue) == before


# -------------------------------------------------------------------- directories that are moved


def test_a_config_map_that_is_swapped(node: Node, blue: str) -> None:
    """As the kubelet does it: files are links into ..data, which is a link that is replaced."""

    def publish(version: str, **files: str) -> None:
        folder = node.manifests / f"..{version}"
        folder.mkdir()
        for name, text in files.items():
            (folder / f"{name}.yaml").write_text(text)
        link(node.manifests / "..data", folder.name)
        for name in files:
            if not (node.manifests / f"{name}.yaml").is_symlink():
                (node.manifests / f"{name}.yaml").symlink_to(f"..data/{name}.yaml")

    publish("2026_1", a=manifest(blue, "22"))
    with node.running() as daemon:
        assert forwarded(blue) == {"tcp 22"}
        publish("2026_2", a=manifest(blue, "23"))
        assert daemon.forwarded(blue) == {"tcp 23"}
        publish("2026_3", a=manifest(blue, "23"), b=manifest(blue, "24", "other"))
        assert daemon.forwarded(blue) == {"tcp 23", "tcp 24"}
        assert not daemon.said("bad manifest")


def test_a_directory_that_appears_later(node: Node, blue: str) -> None:
    late = node.folder / "late" / "later"
    node.configure(manifests=str(late))
    with node.running() as daemon:
        assert daemon.said("source away")
        assert daemon.get("/readyz")[0] == 503
        assert daemon.metric("source_readable") == 0
        late.mkdir(parents=True)
        (late / "a.yaml").write_text(manifest(blue, "22"))
        assert daemon.forwarded(blue) == {"tcp 22"}
        assert daemon.get("/readyz")[0] == 200
        assert daemon.status()["unreadable"] is None
        assert daemon.metric("source_readable") == 1


def test_a_directory_that_goes_away_takes_nothing_with_it(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        before = handles(blue)
        node.manifests.rename(node.folder / "elsewhere")
        assert daemon.shows(lambda status: status["unreadable"])
        assert daemon.said("source away")
        assert str(node.manifests) in daemon.status()["unreadable"]
        node.manifests.write_text("not a directory")
        daemon.reload()
        assert daemon.standing(blue)["state"] == "in sync"
        assert handles(blue) == before
        node.manifests.unlink()
        (node.folder / "elsewhere").rename(node.manifests)
        assert daemon.shows(lambda status: status["unreadable"] is None)
        assert daemon.applied()
        assert handles(blue) == before
        node.save("a.yaml", manifest(blue, "23"))
        assert daemon.forwarded(blue) == {"tcp 23"}


def test_a_directory_that_is_away_at_the_start_takes_nothing_with_it(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running():
        before = handles(blue)
    node.manifests.rename(node.folder / "elsewhere")
    with node.running() as daemon:
        assert daemon.said("source away")
        assert handles(blue) == before
        (node.folder / "elsewhere").rename(node.manifests)
        assert daemon.shows(lambda status: status["unreadable"] is None)
        node.remove("a.yaml")
        assert daemon.forwarded(blue) == set()


def test_a_directory_that_is_replaced_by_another(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        other = node.folder / "other"
        other.mkdir()
        (other / "a.yaml").write_text(manifest(blue, "23"))
        node.manifests.rename(node.folder / "old")
        other.rename(node.manifests)
        assert daemon.forwarded(blue) == {"tcp 23"}
        (node.folder / "old" / "a.yaml").write_text(manifest(blue, "24"))
        node.save("a.yaml", manifest(blue, "25"))
        assert daemon.forwarded(blue) == {"tcp 25"}


def test_a_directory_that_is_a_link_to_another(node: Node, blue: str) -> None:
    for name, port in (("first", "22"), ("second", "23")):
        (node.folder / name).mkdir()
        (node.folder / name / "a.yaml").write_text(manifest(blue, port))
    node.configure(manifests=str(node.folder / "current"))
    link(node.folder / "current", "first")
    with node.running() as daemon:
        assert forwarded(blue) == {"tcp 22"}
        link(node.folder / "current", node.folder / "second")
        assert daemon.forwarded(blue) == {"tcp 23"}
        (node.folder / "second" / "a.yaml").write_text(manifest(blue, "24"))
        assert daemon.forwarded(blue) == {"tcp 24"}


def test_an_entry_that_is_a_link_to_elsewhere(node: Node, blue: str) -> None:
    target = node.folder / "far" / "away.txt"
    target.parent.mkdir()
    target.write_text(manifest(blue, "22"))
    (node.manifests / "a.yaml").symlink_to(target)
    with node.running() as daemon:
        assert forwarded(blue) == {"tcp 22"}
        target.write_text(manifest(blue, "23"))
        assert daemon.forwarded(blue) == {"tcp 23"}
        other = node.folder / "other.txt"
        other.write_text(manifest(blue, "24"))
        link(node.manifests / "a.yaml", other)
        assert daemon.forwarded(blue) == {"tcp 24"}
        other.unlink()
        assert daemon.forwarded(blue) == {"tcp 24"}
        assert daemon.said("bad manifest")
        other.write_text(manifest(blue, "25"))
        assert daemon.forwarded(blue) == {"tcp 25"}


# ------------------------------------------------------------------------------- last good meaning


def last_good(daemon: Running) -> list[str]:
    return list(daemon.status()["last_good"])


def test_a_file_that_turns_bad_keeps_its_last_good_meaning(node: Node, blue: str) -> None:
    text = manifest(blue, "22")
    path = node.save("a.yaml", text)
    broken = {
        "not YAML": BAD.encode(),
        "not a manifest": text.replace("start: 22", "start: 0").encode(),
        "empty": b"",
        "cut off": text[: len(text) * 2 // 3].encode(),
        "only blanks": b"\n \n",
        "not text": bytes(range(256)),
    }
    with node.running() as daemon:
        before = handles(blue)
        for times, (how, content) in enumerate(broken.items(), 1):
            path.write_bytes(content)
            assert daemon.applied(), how
            assert len(daemon.said("bad manifest")) >= times, how
            assert handles(blue) == before, how
        assert not daemon.said("bad manifest", so="nothing of it is applied")
        assert last_good(daemon) == [str(path)]
        assert daemon.metric("manifests_on_last_good") == 1
        assert daemon.standing(blue)["state"] == "outdated"
        assert daemon.standing(blue)["why"] == f"using the last valid version of {path}"
        assert daemon.metric("namespaces", state="outdated") == 1
        assert daemon.metric("manifest_problems") >= 1
        assert handles(blue) == before
        nft(blue, "flush ruleset")
        assert daemon.says("drift repaired", netns=blue)
        assert forwarded(blue) == {"tcp 22"}
        path.write_text(manifest(blue, "22-23"))
        assert daemon.forwarded(blue) == {"tcp 22-23"}
        assert daemon.said("manifest mended or removed", file=str(path))
        assert last_good(daemon) == []
        assert daemon.metric("manifests_on_last_good") == 0
        assert daemon.metric("manifest_problems") == 0


def test_a_bad_file_that_is_removed_takes_its_rules_with_it(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        node.save("a.yaml", BAD)
        assert daemon.forwarded(blue) == {"tcp 22"}
        assert daemon.said("bad manifest")
        node.remove("a.yaml")
        assert daemon.forwarded(blue) == set()


def test_a_file_that_was_never_good_says_so_and_hinders_nobody(
    node: Node, blue: str, red: str
) -> None:
    node.save("a.yaml", BAD)
    node.save("b.yaml", manifest(red, "80"))
    with node.running() as daemon:
        assert daemon.said("bad manifest", so="nothing of it is applied")
        assert [one["file"] for one in daemon.status()["problems"]] == [
            str(node.manifests / "a.yaml")
        ]
        assert last_good(daemon) == []
        assert forwarded(red) == {"tcp 80"}
        node.save("b.yaml", manifest(red, "81"))
        assert daemon.forwarded(red) == {"tcp 81"}
        node.save("a.yaml", manifest(blue, "22", "other"))
        assert daemon.forwarded(blue) == {"tcp 22"}


def test_the_last_good_meaning_outlives_the_daemon(node: Node, blue: str) -> None:
    path = node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        node.save("a.yaml", BAD)
        assert daemon.applied()
        assert daemon.said("bad manifest")
        assert daemon.standing(blue)["state"] == "outdated"
        since = daemon.standing(blue)["since"]
        files = daemon.status()["last_valid"]
        daemon.kill()
    run("ip", "netns", "exec", blue, "nft", "flush ruleset")
    with node.running() as daemon:
        assert forwarded(blue) == {"tcp 22"}
        assert last_good(daemon) == [str(path)]
        assert daemon.standing(blue)["since"] == since == files[0]["since"]
        assert daemon.status()["last_valid"] == files
        path.write_text(manifest(blue, "23"))
        assert daemon.forwarded(blue) == {"tcp 23"}


def test_rules_of_an_invalid_manifest_without_a_last_valid_version_are_reported_as_unmanaged(
    node: Node, blue: str, red: str
) -> None:
    """State lost, manifest invalid: nothing tells any more which namespace it was for."""
    node.save("a.yaml", manifest(blue, "22"))
    node.save("b.yaml", manifest(red, "22", "one") + "---\n" + manifest(red, "23", "two"))
    with node.running():
        before = handles(blue)
    shutil.rmtree(node.state)
    node.save("a.yaml", BAD)
    node.save("b.yaml", BAD)
    node.save("c.yaml", manifest(red, "22", "one"))
    with node.running() as daemon:
        assert daemon.is_in("unmanaged", blue)
        assert f"portranger clear --netns {blue}" in daemon.standing(blue)["why"]
        assert daemon.is_in("unmanaged", red)
        assert "VirtualMachine/default/two/red" in daemon.standing(red)["why"]
        assert daemon.metric("namespaces", state="unmanaged") >= 2
        assert handles(blue) == before
        assert forwarded(red) == {"tcp 22", "tcp 23"}
        node.save("a.yaml", manifest(blue, "22"))
        assert daemon.applied()
        assert daemon.standing(blue)["state"] == "in sync"
        node.remove("b.yaml")
        assert daemon.forwarded(red) == {"tcp 22"}
        assert daemon.standing(red)["state"] == "in sync"


def test_unmanaged_rules_that_are_cleared_are_no_longer_reported(node: Node, blue: str) -> None:
    applied(blue, vm("by-hand", "22"))
    node.save("a.yaml", BAD)
    with node.running() as daemon:
        assert daemon.is_in("unmanaged", blue)
        run("ip", "netns", "exec", blue, "nft", "delete table inet portranger")
        assert eventually(lambda: not daemon.standing(blue))


def test_what_was_good_last_is_what_counts_not_what_was_good_first(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        node.save("a.yaml", manifest(blue, "23"))
        assert daemon.forwarded(blue) == {"tcp 23"}
        node.save("a.yaml", BAD)
        assert daemon.applied()
        assert daemon.said("bad manifest")
    run("ip", "netns", "exec", blue, "nft", "flush ruleset")
    with node.running():
        assert forwarded(blue) == {"tcp 23"}


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda _: b"\x00\xff{",
    lambda _: b"",
    lambda _: b"[" * 100_000,
    lambda stored: stored[: len(stored) // 2],
    lambda stored: stored.replace(b"start: ", b"start: 1"),
    lambda stored: stored.replace(b'"format": 1', b'"format": 2'),
]


def test_corrupt_state_is_set_aside_and_takes_no_rules_with_it(node: Node, blue: str) -> None:
    files = [f"{place}.yaml" for place in range(len(DAMAGES))]
    for place, file in enumerate(files):
        node.save(file, manifest(blue, str(22 + 2 * place), f"vm-{place}"))
    with node.running():
        before = handles(blue)
    all_stored = sorted((node.state / "last-good").glob("*.json"))
    for stored, damage in zip(all_stored, DAMAGES, strict=True):
        stored.write_bytes(damage(stored.read_bytes()))
    for file in files:
        node.save(file, BAD)
    with node.running() as daemon:
        assert len(daemon.said("warning")) == len(DAMAGES)
        assert all("aside" in one["what"] for one in daemon.said("warning"))
        assert all(Path(f"{stored}.corrupt").exists() for stored in all_stored)
        assert handles(blue) == before
        for file in files[1:]:
            node.remove(file)
        node.save(files[0], manifest(blue, "99"))
        assert daemon.forwarded(blue) == {"tcp 99"}
    with node.running() as daemon:
        assert not daemon.said("warning")


def test_corrupt_names_of_what_to_clear_are_set_aside(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    node.state.mkdir()
    (node.state / "leaving.json").write_text("}{")
    with node.running() as daemon:
        assert (node.state / "leaving.json.corrupt").exists()
        assert forwarded(blue) == {"tcp 22"}
        assert daemon.said("warning")


# ---------------------------------------------------------------------- while nobody was looking


def test_a_manifest_that_is_removed_while_the_daemon_is_down(
    node: Node, blue: str, red: str
) -> None:
    node.save("a.yaml", manifest(blue, "22", "one"))
    node.save("b.yaml", manifest(red, "80", "two"))
    with node.running():
        before = handles(red)
    assert forwarded(blue) == {"tcp 22"}
    localnet = ("sysctl", "-n", "net.ipv4.conf.k6t-eth0.route_localnet")
    assert within(blue, *localnet).strip() == "1"
    node.remove("a.yaml")
    with node.running() as daemon:
        assert not observed(blue).table
        assert within(blue, *localnet).strip() == "0"
        assert handles(red) == before
        assert not daemon.standing(blue)


def test_a_manifest_that_is_removed_and_the_daemon_killed_before_it_could_look(
    node: Node, blue: str
) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        comes_to_store(node)
        daemon.kill()
    node.remove("a.yaml")
    with node.running():
        assert not observed(blue).table


def test_a_machine_that_moves_to_another_namespace_while_the_daemon_is_down(
    node: Node, blue: str, red: str
) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running():
        pass
    node.save("a.yaml", manifest(red, "22"))
    with node.running():
        assert forwarded(red) == {"tcp 22"}
        assert not observed(blue).table


def test_a_machine_that_moves_to_another_namespace_while_it_runs(
    node: Node, blue: str, red: str
) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        node.save("a.yaml", manifest(red, "22"))
        assert daemon.forwarded(red) == {"tcp 22"}
        assert daemon.forwarded(blue) == set()


def test_rules_stay_in_a_namespace_that_no_manifest_ever_named(
    node: Node, blue: str, red: str
) -> None:
    """Somebody ran `portranger apply` there: that is none of the daemon's."""
    applied(blue, vm("by-hand", "22"))
    before = handles(blue)
    with node.running() as daemon:
        assert_seen(node, daemon, red)
        assert handles(blue) == before


# -------------------------------------------------------------------------- writers in the middle


def test_a_writer_in_the_middle_takes_no_ports_away(node: Node, blue: str, red: str) -> None:
    """The first half of the file is a whole manifest, so that only its writer tells."""
    text = manifest(blue, "22", "one") + "---\n" + manifest(blue, "23", "two")
    path = node.save("a.yaml", text)
    with node.running() as daemon:
        before = handles(blue)
        with path.open("w") as file:
            file.write(text.partition("---\n")[0])
            file.flush()
            assert_seen(node, daemon, red)
            daemon.reload()
            assert handles(blue) == before
            file.write("---\n" + manifest(blue, "24", "two"))
            file.flush()
            assert_seen(node, daemon, red)
            assert handles(blue) == before
        assert daemon.forwarded(blue) == {"tcp 22", "tcp 24"}
        assert not daemon.said("bad manifest")


def test_a_new_file_is_read_when_its_writer_is_done(node: Node, blue: str, red: str) -> None:
    with node.running() as daemon:
        with (node.manifests / "a.yaml").open("w") as file:
            file.write(manifest(blue, "22", "one"))
            file.flush()
            assert_seen(node, daemon, red)
            assert forwarded(blue) == set()
            file.write("---\n" + manifest(blue, "23", "two"))
        assert daemon.forwarded(blue) == {"tcp 22", "tcp 23"}
        assert not daemon.said("bad manifest")


# ------------------------------------------------------------------------------------- conflicts


def test_of_two_new_files_in_conflict_neither_is_applied(node: Node, blue: str, red: str) -> None:
    node.save("a.yaml", manifest(blue, "22-30", "one"))
    node.save("b.yaml", manifest(blue, "30-40", "two"))
    node.save("c.yaml", manifest(red, "22", "three"))
    with node.running() as daemon:
        assert forwarded(blue) == set()
        assert forwarded(red) == {"tcp 22"}
        problems = daemon.status()["problems"]
        assert [Path(problem["file"]).name for problem in problems] == ["a.yaml", "b.yaml"]
        for problem in problems:
            assert problem["code"] == "conflict"
            assert "VirtualMachine/default/one" in problem["problem"]
            assert "VirtualMachine/default/two" in problem["problem"]
        node.save("b.yaml", manifest(blue, "31-40", "two"))
        assert daemon.forwarded(blue) == {"tcp 22-30", "tcp 31-40"}
        assert daemon.status()["problems"] == []


def test_what_ran_before_stays_when_a_new_file_is_in_conflict_with_it(
    node: Node, blue: str
) -> None:
    node.save("a.yaml", manifest(blue, "22", "one"))
    with node.running() as daemon:
        before = handles(blue)
        node.save("b.yaml", manifest(blue, "22-23", "two"))
        assert daemon.applied()
        assert daemon.standing(blue)["state"] == "conflict"
        assert "VirtualMachine/default/two" in daemon.standing(blue)["why"]
        assert daemon.metric("namespaces", state="conflict") == 1
        assert handles(blue) == before
    with node.running() as daemon:
        assert handles(blue) == before
        assert daemon.standing(blue)["state"] == "conflict"
        node.remove("a.yaml")
        assert daemon.forwarded(blue) == {"tcp 22-23"}
        assert daemon.standing(blue)["state"] == "in sync"


def test_a_port_that_goes_from_one_file_to_another_whichever_is_saved_first(
    node: Node, blue: str
) -> None:
    node.save("a.yaml", manifest(blue, "22,80", "one"))
    node.save("b.yaml", manifest(blue, "23", "two"))
    with node.running() as daemon:
        node.save("b.yaml", manifest(blue, "23,80", "two"))
        assert daemon.forwarded(blue) == {"tcp 22", "tcp 80", "tcp 23"}
        assert daemon.standing(blue)["state"] == "conflict"
        node.save("a.yaml", manifest(blue, "22", "one"))
        assert daemon.applied()
        assert daemon.standing(blue)["state"] == "in sync"
        owners = {one.rule.owner for one in observed(blue).live if str(one.rule.ports) == "80"}
        assert owners == {"VirtualMachine/default/two/red"}


def test_a_new_bad_file_does_not_keep_a_removed_one_alive(node: Node, blue: str, red: str) -> None:
    node.save("a.yaml", manifest(blue, "22", "one"))
    node.save("b.yaml", manifest(red, "22", "two") + "---\n" + manifest(red, "23", "three"))
    with node.running() as daemon:
        node.save("c.yaml", BAD)
        assert daemon.applied()
        assert daemon.said("bad manifest")
        node.remove("a.yaml")
        assert daemon.forwarded(blue) == set()
        node.save("b.yaml", manifest(red, "22", "two"))
        assert daemon.forwarded(red) == {"tcp 22"}


# ------------------------------------------------------------------------------------- odd entries


def test_one_odd_entry_hinders_no_other(node: Node, blue: str) -> None:
    folder = node.manifests
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "through-a-file.yaml").symlink_to(f"{node.config}/x")
    (folder / "nowhere.yaml").symlink_to("nowhere/to/be/found")
    (folder / "endless.yaml").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.yaml")
    (folder / "directory.yaml").mkdir()
    (folder / "deep.yaml").write_text("[" * 50_000)
    (folder / "nul.yaml").write_text(manifest(blue, "22", "nul").replace(blue, r'"a\0b"'))
    (folder / os.fsdecode(b"\xff\n.yaml")).write_text(BAD)
    node.save("good.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        assert forwarded(blue) == {"tcp 22"}
        node.save("good.yaml", manifest(blue, "23"))
        assert daemon.forwarded(blue) == {"tcp 23"}
        assert daemon.status()["unreadable"] is None
        assert len({one["file"] for one in daemon.status()["problems"]}) >= 6


def test_a_bug_met_in_one_file_costs_no_other_file_anything(
    node: Node, blue: str, tmp_path: Path
) -> None:
    marked = "metadata:\n  labels: {boom: x}\n"
    with (
        pod() as red,
        pod() as green,
        node.running(environment=faulty.environment(tmp_path / "custom")) as daemon,
    ):
        node.save("a.yaml", manifest(blue, "22", "a"))
        node.save("b.yaml", manifest(red, "80", "b"))
        assert daemon.forwarded(blue) == {"tcp 22"}
        assert daemon.forwarded(red) == {"tcp 80"}
        node.save("b.yaml", manifest(red, "81", "b").replace("metadata:\n", marked, 1))
        node.save("c.yaml", manifest(green, "82", "boom"))
        assert daemon.applied()
        assert len(daemon.status()["problems"]) == 2
        node.save("a.yaml", manifest(blue, "23", "a"))
        assert daemon.forwarded(blue) == {"tcp 23"}
        assert (forwarded(red), forwarded(green)) == ({"tcp 80"}, set())
        for problem in daemon.status()["problems"]:
            assert problem["code"] == "internal-error"
            assert f"ZeroDivisionError: {faulty.SAID}" in str(problem)
        daemon.reload()
        assert (forwarded(blue), forwarded(red)) == ({"tcp 23"}, {"tcp 80"})
        node.save("b.yaml", manifest(red, "83", "b"))
        assert daemon.forwarded(red) == {"tcp 83"}
        assert len(daemon.said("bad manifest")) >= 2


def test_a_bug_met_in_all_files_together_leaves_everything_as_it_was(
    node: Node, blue: str, tmp_path: Path
) -> None:
    environment = faulty.environment(tmp_path / "custom")
    with pod() as red, node.running(environment=environment) as daemon:
        node.save("a.yaml", manifest(blue, "22", "a"))
        assert daemon.forwarded(blue) == {"tcp 22"}
        node.save("b.yaml", manifest(red, "80", faulty.TOGETHER))
        assert daemon.shows(lambda status: faulty.SAID in str(status["unreadable"]))
        assert (forwarded(blue), forwarded(red)) == ({"tcp 22"}, set())
        nft(blue, "flush ruleset")
        assert daemon.says("drift repaired", netns=blue)
        assert forwarded(blue) == {"tcp 22"}
        node.remove("b.yaml")
        node.save("a.yaml", manifest(blue, "23", "a"))
        assert daemon.forwarded(blue) == {"tcp 23"}
        assert not daemon.status()["unreadable"]


def test_a_bug_met_in_all_files_at_the_start_removes_nothing(
    node: Node, blue: str, tmp_path: Path
) -> None:
    environment = faulty.environment(tmp_path / "custom")
    with pod() as red:
        with node.running(environment=environment) as daemon:
            node.save("a.yaml", manifest(blue, "22", "a"))
            assert daemon.forwarded(blue) == {"tcp 22"}
            comes_to_store(node)
        node.save("b.yaml", manifest(red, "80", faulty.TOGETHER))
        with node.running(environment=environment) as daemon:
            assert faulty.SAID in str(daemon.status()["unreadable"])
            daemon.reload()
            assert (forwarded(blue), forwarded(red)) == ({"tcp 22"}, set())
            node.remove("b.yaml")
            node.save("a.yaml", manifest(blue, "23", "a"))
            assert daemon.forwarded(blue) == {"tcp 23"}


def test_a_bug_met_in_another_directory_after_a_reload_removes_nothing(
    node: Node, blue: str, tmp_path: Path
) -> None:
    environment = faulty.environment(tmp_path / "custom")
    with pod() as red, node.running(environment=environment) as daemon:
        node.save("a.yaml", manifest(blue, "22", "a"))
        assert daemon.forwarded(blue) == {"tcp 22"}
        other = tmp_path / "other.d"
        other.mkdir()
        (other / "b.yaml").write_text(manifest(red, "80", faulty.TOGETHER))
        node.configure(manifests=str(other))
        daemon.reload()
        assert faulty.SAID in str(daemon.status()["unreadable"])
        assert (forwarded(blue), forwarded(red)) == ({"tcp 22"}, set())
