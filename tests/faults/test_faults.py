"""What goes wrong while we work: each ends in a whole ruleset and a sentence, never in half of one
and a traceback."""

from __future__ import annotations

import ctypes
import io
import os
import random
import re
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from agent.commands.apply import apply
from agent.console import Console
from agent.errors import BackendMissing, Failure, NoNamespace, Stale, TryAgain
from agent.kernel.kinds import Namespace
from agent.kernel.live import LiveKernel
from agent.kernel.nftables import failure
from agent.reconcile import ATTEMPTS, converge
from rules.desired import desire
from rules.model import Desired, Machine, Observed, Rule, Surroundings
from rules.plan import Plan, Table
from rules.values import replace
from tests.spaces import (
    ROOT,
    applied,
    emptied,
    ip,
    manifest,
    nft,
    observed,
    pod,
    run,
    vm,
    wanted,
    within,
)

DESKTOP = vm("desktop", "1000-8000,1000-8000/udp")
SCRIBBLE = "insert rule inet portranger prerouting tcp dport 99 counter accept"


@pytest.fixture(scope="module")
def only() -> Iterator[str]:
    with pod() as name:
        yield name


@pytest.fixture
def netns(only: str) -> str:
    """For tests that leave its links as they are."""
    return emptied(only)


@pytest.fixture
def fragile() -> Iterator[str]:
    """For tests that do not."""
    with pod() as name:
        yield name


class Haunted:
    """A namespace in which something happens between our look and our commit."""

    def __init__(self, namespace: Namespace, haunt: Callable[[int], None]) -> None:
        self._namespace = namespace
        self._haunt = haunt
        self.commits = 0

    def surroundings(self) -> Surroundings:
        return self._namespace.surroundings()

    def observe(self, sysctls: Iterable[str] = ()) -> Observed:
        return self._namespace.observe(sysctls)

    def commit(self, plan: Plan) -> None:
        self.commits += 1
        assert self.commits < 50, "without end"
        self._haunt(self.commits)
        self._namespace.commit(plan)


def haunted_converge(netns: str, machine: Machine | None, haunt: Callable[[int], None]) -> int:
    """Converge while somebody haunts; how many commits it took."""
    desired = wanted(netns, [machine]) if machine else Desired()
    with LiveKernel().opened(netns) as namespace:
        haunted = Haunted(namespace, haunt)
        converge(netns, desired, haunted)
    return haunted.commits


def assert_holds(netns: str, *machines: Machine) -> None:
    seen = observed(netns)
    assert rules_of(seen) == Counter(wanted(netns, machines).rules)
    assert not seen.foreign
    assert not seen.unsound
    assert applied(netns, *machines).empty


def rules_of(seen: Observed) -> Counter[Rule]:
    return Counter(live.rule for live in seen.live)


# ---------------------------------------------------------------- strangers between look and commit


def once(netns: str, script: str) -> Callable[[int], None]:
    """A stranger who does this before our first commit, and then lets us be."""

    def haunt(commit: int) -> None:
        if commit == 1:
            nft(netns, script)

    return haunt


STRANGERS = {
    "flushes our table": "flush table inet portranger",
    "deletes our table": "delete table inet portranger",
    "scribbles into it": SCRIBBLE,
    "flushes a chain and scribbles": f"flush chain inet portranger prerouting\n{SCRIBBLE}",
    "puts it to sleep": "add table inet portranger { flags dormant; }",
    "adds a chain": "add chain inet portranger extra",
    "deletes a chain": ("flush chain inet portranger output\ndelete chain inet portranger output"),
    "gives a chain another priority": (
        "flush chain inet portranger output\ndelete chain inet portranger output\n"
        "add chain inet portranger output { type nat hook output priority -7; }"
    ),
}


@pytest.mark.parametrize("script", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize(
    "after", [vm("desktop", "1000-5000,22/udp"), None], ids=["editing", "removing"]
)
@pytest.mark.parametrize("unsound", [False, True], ids=["sound", "unsound"])
def test_a_stranger_who_edits_between_look_and_commit_is_overruled(
    netns: str, script: str, after: Machine | None, unsound: bool
) -> None:
    applied(netns, DESKTOP)
    if unsound:
        nft(netns, "add counter inet portranger odd")
    commits = haunted_converge(netns, after, once(netns, script))
    assert commits <= 3
    assert_holds(netns, *([after] if after else []))


@pytest.mark.parametrize(
    "script",
    [
        "add table inet portranger",
        "add table inet portranger; add chain inet portranger extra",
        "add table inet portranger { flags dormant; }",
        "add table inet portranger; add chain inet portranger output",
    ],
)
def test_a_table_that_appears_between_look_and_commit_is_taken_over(
    netns: str, script: str
) -> None:
    haunted_converge(netns, DESKTOP, once(netns, script))
    assert_holds(netns, DESKTOP)


def test_a_stranger_in_every_window_makes_us_give_up_and_say_so(netns: str) -> None:
    applied(netns, DESKTOP)
    nft(netns, SCRIBBLE)

    def haunt(_: int) -> None:  # the rule we are about to remove is always another one
        (foreign,) = observed(netns).foreign
        nft(
            netns,
            f"delete rule inet portranger prerouting handle {foreign.handle}\n{SCRIBBLE}",
        )

    with pytest.raises(TryAgain, match="somebody else keeps changing our table") as refusal:
        haunted_converge(netns, DESKTOP, haunt)
    assert refusal.value.exit_code == 75
    applied(netns, DESKTOP)
    assert_holds(netns, DESKTOP)


class Undone(Haunted):
    """A namespace in which somebody scribbles after each of our commits."""

    def observe(self, sysctls: Iterable[str] = ()) -> Observed:
        self._haunt(self.commits)
        return super().observe(sysctls)


def test_a_stranger_who_undoes_every_commit_makes_us_give_up_and_say_what_is_left(
    netns: str,
) -> None:
    applied(netns, DESKTOP)
    desired = wanted(netns, [DESKTOP])
    with LiveKernel().opened(netns) as namespace:
        undone = Undone(namespace, lambda _: nft(netns, SCRIBBLE))
        with pytest.raises(Failure, match="a foreign rule in prerouting") as refusal:
            converge(netns, desired, undone)
    assert refusal.value.exit_code in (1, 75)
    assert undone.commits == ATTEMPTS


def test_two_of_us_at_once_end_in_one_ruleset(netns: str) -> None:
    def haunt(commit: int) -> None:
        if commit == 1:  # both have seen an empty namespace, and both create
            applied(netns, DESKTOP)

    haunted_converge(netns, DESKTOP, haunt)
    assert_holds(netns, DESKTOP)


# ------------------------------------------------------------------------- things that vanish


def test_a_namespace_that_is_deleted_between_look_and_commit_does_no_harm() -> None:
    with pod() as name:
        desired = wanted(name, [DESKTOP])
        with LiveKernel().opened(name) as namespace:
            haunted = Haunted(namespace, lambda _: _deleted(name))
            converge(name, desired, haunted)  # it lives on while we hold it open
        with pytest.raises(NoNamespace), LiveKernel().opened(name):
            pass


def _deleted(netns: str) -> None:
    run("ip", "netns", "del", netns)


def test_apply_says_that_a_namespace_vanished_and_serves_the_others() -> None:
    with pod() as gone, pod() as there:
        text = "---\n".join((manifest(gone, "22", "a"), manifest(there, "22", "b")))
        out, err = io.StringIO(), io.StringIO()

        def confirm(_: str) -> bool:
            run("ip", "netns", "del", gone)
            return True

        console = Console(out, err, text.encode)
        code = apply(["-"], console, kernel=LiveKernel(), confirm=confirm)
        assert code == 75
        assert f"there is no network namespace {gone}" in err.getvalue()
        assert f"Applied in namespace {there}" in out.getvalue()
        assert len(observed(there).live) > 0


def test_a_link_that_vanishes_before_its_setting_is_made_is_said_so(fragile: str) -> None:
    desired = wanted(fragile, [DESKTOP])
    ip(fragile, "link del k6t-eth0")
    with LiveKernel().opened(fragile) as namespace:
        with pytest.raises(TryAgain, match="k6t-eth0"):
            converge(fragile, desired, namespace)
        assert not namespace.observe().table, "rules that would lead nowhere"


def test_a_pod_that_loses_its_address_keeps_its_rules(fragile: str) -> None:
    applied(fragile, DESKTOP)
    before = observed(fragile)
    ip(fragile, "addr flush dev eth0")
    assert applied(fragile, DESKTOP).empty
    assert observed(fragile) == before


# -------------------------------------------------------------------------------------- SIGKILL

STREAM = """
import sys, time
from agent.kernel.live import LiveKernel
from agent.reconcile import ATTEMPTS, converge
from rules.desired import desire
from tests.spaces import vm
netns, *sides = sys.argv[1:]
deadline = time.monotonic() + 30
with LiveKernel().opened(netns) as namespace:
    both = [desire([vm("desktop", side)], namespace.surroundings()) for side in sides]
    while time.monotonic() < deadline:
        for desired in both:
            converge(netns, desired, namespace)
            sys.stdout.write(".")
            sys.stdout.flush()
"""
SIDES = (
    ",".join(f"{first}-{first + 5}" for first in range(1000, 1400, 10)),
    ",".join(f"{first}-{first + 8}/udp" for first in range(1005, 1405, 10)),
)
KILLS = 30


def test_a_kill_at_any_point_leaves_the_old_ruleset_or_the_new_one_whole(netns: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)  # noqa: T201 - to repeat a failure
    chance = random.Random(seed)
    desired = [wanted(netns, [vm("desktop", side)]) for side in SIDES]
    whole = [Counter(one.rules) for one in desired]
    with LiveKernel().opened(netns) as namespace:
        converge(netns, desired[0], namespace)
    found: Counter[int] = Counter()
    for _ in range(KILLS):
        kill_while_it_commits(netns, chance.randint(2, 5), chance.random())
        seen = observed(netns)
        assert rules_of(seen) in whole, f"half a ruleset, with seed {seed}"
        assert not seen.foreign
        assert not seen.unsound
        found[whole.index(rules_of(seen))] += 1
        applied(netns, vm("desktop", SIDES[chance.randrange(2)]))
    assert len(found) == 2, f"every kill fell into the same half: {found}, with seed {seed}"
    applied(netns, vm("desktop", SIDES[0]))
    assert_holds(netns, vm("desktop", SIDES[0]))


def kill_while_it_commits(netns: str, commits: int, part: float) -> None:
    """Run a process that commits one thing after another, let it do so many commits, and kill it
    after a part of the time that one takes."""
    child = subprocess.Popen(
        [sys.executable, "-c", STREAM, netns, *SIDES], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        took = 0.0
        for _ in range(commits):
            started = time.monotonic()
            assert select.select([child.stdout], [], [], 30)[0], "it commits no more"
            assert os.read(child.stdout.fileno(), 1) == b"."
            took = time.monotonic() - started
        time.sleep(part * took)
        assert child.poll() is None, "it ended by itself"
    finally:
        child.kill()
        child.communicate(timeout=30)


# ------------------------------------------------------------------ a machine without this or that


def in_a_room(*preparations: str, words: Iterable[str | Path], stdin: str) -> tuple[int, str]:
    """Run the command with mounts of its own, changed as told; its exit code and what it said."""
    script = " && ".join([*preparations, 'exec "$0" "$@"'])
    done = run(
        *("unshare", "--mount", "--propagation", "private", "sh", "-c", script),
        *(sys.executable, "-m", "agent.entry", *words),
        stdin=stdin,
        code=None,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def library() -> str:
    """Where libnftables is on this machine."""
    ctypes.CDLL("libnftables.so.1")
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"/\S*libnftables\.so\S*", maps)
    assert found
    return found.group()


@pytest.mark.parametrize(
    "words",
    [("plan", "-f", "-"), ("apply", "--yes", "-f", "-"), ("show", "--netns", "{}")],
    ids=lambda words: words[0],
)
def test_without_libnftables_the_command_says_what_to_install(
    netns: str, words: tuple[str, ...]
) -> None:
    code, said = in_a_room(
        f"mount --bind /dev/null {library()}",
        words=[word.format(netns) for word in words],
        stdin=manifest(netns, "22"),
    )
    assert code == 69, said
    assert "apt install libnftables1" in said


def test_a_dry_run_needs_no_libnftables(netns: str) -> None:
    code, said = in_a_room(
        f"mount --bind /dev/null {library()}",
        words=("plan", "--against", "empty", "-f", "-"),
        stdin=manifest(netns, "22"),
    )
    assert (code, said) == (0, "")


READ_ONLY = ("mount --bind /proc/sys /proc/sys", "mount -o remount,ro,bind /proc/sys")


def test_where_settings_are_read_only_nothing_is_applied_and_it_says_so(netns: str) -> None:
    code, said = in_a_room(
        *READ_ONLY, words=("apply", "--yes", "-f", "-"), stdin=manifest(netns, "22")
    )
    assert code == 77, said
    assert "/proc/sys" in said
    assert not observed(netns).table


def test_where_settings_are_read_only_but_made_already_rules_are_applied(netns: str) -> None:
    applied(netns, vm("desktop", "22"))
    code, said = in_a_room(
        *READ_ONLY, words=("apply", "--yes", "-f", "-"), stdin=manifest(netns, "23")
    )
    assert code == 0, said
    assert_holds(netns, vm("desktop", "23"))


def test_a_read_only_machine_can_still_be_asked(netns: str) -> None:
    code, said = in_a_room(*READ_ONLY, words=("plan", "-f", "-"), stdin=manifest(netns, "22"))
    assert code == 0, said


SCARCE = """
import ctypes, os, resource, sys
from agent.errors import Failure
from agent.kernel.live import LiveKernel
from agent.reconcile import ATTEMPTS, converge
from rules.desired import desire
from tests.spaces import vm
netns, loaded = sys.argv[1:]
if loaded == "loaded":
    ctypes.CDLL("libnftables.so.1")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    for _ in range(64):
        held.append(os.dup(0))
except OSError:
    pass
for spare in range(12):
    try:
        with LiveKernel().opened(netns) as namespace:
            converge(netns, desire([vm("a", "22")], namespace.surroundings()), namespace)
    except Failure as failure:
        print(spare, failure)
    else:
        sys.exit(0 if spare else 2)
    os.close(held.pop())
sys.exit(3)
"""


@pytest.mark.parametrize("loaded", ["loaded", "not loaded"])
def test_without_descriptors_to_spare_each_call_fails_and_the_process_lives(
    netns: str, loaded: str
) -> None:
    done = run(sys.executable, "-c", SCARCE, netns, loaded, code=None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Too many open files" in done.stdout
    assert_holds(netns, vm("a", "22"))


# --------------------------------------------------------------------------- what errors mean


def test_a_refusal_of_the_kernel_is_told_apart_from_a_stale_look() -> None:
    gone = "Error: Could not process rule: No such file or directory"
    assert isinstance(failure(gone, Table.KEEP), Stale)
    assert isinstance(failure(gone, Table.REMAKE), Stale)
    assert isinstance(failure(gone, Table.CREATE), BackendMissing)
    assert failure("Error: Operation not supported", Table.CREATE).exit_code == 69
    assert failure("Error: Operation not permitted", Table.KEEP).exit_code == 77
    assert failure("Error: something new", Table.KEEP).exit_code == 1
    assert failure("", Table.KEEP).exit_code == 1


def test_a_plan_that_the_kernel_refuses_changes_nothing(netns: str) -> None:
    applied(netns, DESKTOP)
    before = observed(netns)
    with LiveKernel().opened(netns) as namespace:
        desired = desire([DESKTOP], namespace.surroundings())
        rule = next(iter(desired.rules))
        plan = Plan(netns=netns, add=(replace(rule, interface="a name too long for a link"),))
        with pytest.raises(Failure) as refusal:
            namespace.commit(plan)
    assert refusal.value.exit_code in (1, 75)
    assert observed(netns) == before
    assert within(netns, "nft", "list", "tables") == "table inet portranger\n"
