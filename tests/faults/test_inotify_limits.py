"""A kernel that gives no more inotify: what changes is looked for by timer, and whoever runs the
node is told which limit to raise. Tried in a user namespace, which has limits of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.daemon.running import Node, Running, comes_to_forward
from tests.spaces import eventually, manifest, run

APART = ("unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-ec")
LIMITED = 'echo "$2" > "/proc/sys/user/max_inotify_$1"; shift 2; '
POD = """
mount -t tmpfs none /run
ip netns add blue
ip -n blue -batch - <<-END
    link add eth0 type bridge
    link add k6t-eth0 type bridge
    link set eth0 up
    link set k6t-eth0 up
    addr add 192.0.2.2/24 dev eth0
    addr add 10.0.2.1/24 dev k6t-eth0
END
"""
HASTY = f"""
shift 3
set -- {sys.executable} -c 'from agent import entry, inotify
inotify.PAUSE = 0.5
entry.main()' "$@"
"""
TIMERS = """
import sys
from pathlib import Path
from agent.kernel.arrivals import Arrivals
from agent.sources.watch import Watch

now, told, folder = 0.0, [], sys.argv[1]
watch = Watch(folder, lambda: now, told.append)
arrivals = Arrivals(told.append, lambda: now)
watch.follow([])

def looked():
    seen = [bool(watch.stirred()), arrivals.stirred()]
    if seen[0]:
        watch.follow([])
    print(*seen, watch.due, arrivals.due)

for now in (0.0, 9.0, 10.0):
    arrivals.follow([f"{folder}/{now}"])
    looked()
Path("/proc/sys/user/max_inotify_watches").write_text("1000")
arrivals.follow([folder])
for now in (19.0, 20.0, 30.0):
    looked()
Path(folder, "new").mkdir()
looked()
print(len(set(told)))
"""
NO_DESCRIPTORS = """
import resource
from agent.inotify import Inotify
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
try:
    kept = [Inotify() for _ in range(30)]
except OSError as error:
    print(error)
"""


def limited(what: str, most: int, script: str = "") -> tuple[str, ...]:
    """Words that run others where so many watches or instances are to be had."""
    return (*APART, f'{LIMITED}{script}exec "$@"', "sh", what, str(most))


@pytest.fixture(autouse=True, scope="module")
def may_set_limits() -> None:
    attempt = run(*limited("watches", 1), "true", code=None)
    if attempt.returncode != 0:
        pytest.skip(f"cannot make a user namespace with limits of its own: {attempt.stderr}")


@contextmanager
def spent(node: Node, most: int = 1) -> Iterator[tuple[Running, str]]:
    """A daemon that gets so many watches, in a hurry; and where a namespace is that it can
    enter."""
    with node.running(*limited("watches", most, POD + HASTY)) as daemon:
        yield daemon, f"/proc/{daemon.pid}/root/run/netns/blue"


def allow(daemon: Running, watches: int) -> None:
    """As whoever runs the node does who has read the warning."""
    script = f"echo {watches} > /proc/sys/user/max_inotify_watches"
    run("nsenter", "--user", "--target", str(daemon.pid), "sh", "-c", script)


def watches(daemon: Running) -> int:
    """How many the daemon has."""
    found = 0
    for file in list(Path(f"/proc/{daemon.pid}/fdinfo").iterdir()):
        with suppress(FileNotFoundError):  # closed meanwhile
            found += file.read_text().count("inotify wd:")
    return found


# ------------------------------------------------------------------------------------- watches


def test_without_watches_it_is_looked_every_ten_seconds_until_they_are_to_be_had(
    tmp_path: Path,
) -> None:
    said = run(*limited("watches", 1), sys.executable, "-c", TIMERS, tmp_path).stdout
    assert said.splitlines() == [
        "False False 10.0 10.0",
        "False False 10.0 10.0",
        "True True 20.0 20.0",
        # There are enough by now: but what was missed is still to be found.
        "False False 20.0 20.0",
        "True True None None",
        "False False None None",
        "True True None None",  # by events
        "1",  # warning, however often
    ]


def test_an_edit_that_is_not_told_is_found_all_the_same(node: Node) -> None:
    with spent(node) as (daemon, blue):
        for port in ("22", "23"):
            node.save("a.yaml", manifest("blue", port))
            assert comes_to_forward(blue, f"tcp {port}")
        [warning] = daemon.said("warning")
        assert "raise fs.inotify.max_user_watches" in warning["what"]
        assert watches(daemon) == 1
        allow(daemon, 1000)
        steps = {*node.manifests.parents, Path("/run/netns")}
        assert eventually(lambda: watches(daemon) > len(steps))
        node.save("a.yaml", manifest("blue", "24"))
        assert comes_to_forward(blue, "tcp 24")
        assert len(daemon.said("warning")) == 1


def test_a_namespace_that_is_not_told_is_found_all_the_same(node: Node) -> None:
    """A link is no mount, of which the kernel would tell; and manifests, of which it does tell
    here, are not looked at again."""
    link = node.folder / "aside" / "link"
    link.parent.mkdir()
    node.save("a.yaml", manifest(str(link), "22"))
    enough = len([node.manifests, *node.manifests.parents]) + len(["/", "/run", "/run/netns"])
    with spent(node, enough) as (daemon, blue):
        assert watches(daemon) == enough
        [warning] = daemon.said("warning")
        assert "raise fs.inotify.max_user_watches" in warning["what"]
        link.symlink_to("/run/netns/blue")
        assert comes_to_forward(blue, "tcp 22")


# ----------------------------------------------------------------------------------- instances


@pytest.mark.parametrize("most", [0, 1])
def test_without_instances_it_says_which_limit_to_raise(node: Node, most: int) -> None:
    code, said = node.refused(*limited("instances", most))
    assert code == 75
    [line] = [one for one in said.splitlines() if one.startswith("portranger: ")]
    assert "no more inotify instances. Raise fs.inotify.max_user_instances" in line


def test_a_process_that_may_open_no_more_files_blames_nobody_else() -> None:
    said = run(sys.executable, "-c", NO_DESCRIPTORS).stdout
    assert said == "[Errno 24] Too many open files: 'inotify'\n"
