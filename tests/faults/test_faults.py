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
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from agent.commands.apply import apply
from agent.console import Console
from agent.errors import BackendMissing, Failure, NoNamespace, Stale, TryAgain
from agent.kernel.iptables import failure as iptables_failure
from agent.kernel.kinds import Namespace
from agent.kernel.nftables import failure
from agent.reconcile import ATTEMPTS, converge
from rules.desired import desire
from rules.foreign_filters import Filter
from rules.model import (
    Address,
    Desired,
    Family,
    Machine,
    Members,
    Observed,
    Peers,
    Rule,
    Surroundings,
)
from rules.plan import Plan, Table
from rules.publish import Node
from rules.values import replace
from tests.netns.arenas import Arena, IptablesArena, NftablesArena
from tests.spaces import (
    BACKENDS,
    IPTABLES,
    NFTABLES,
    ROOT,
    applied,
    asked,
    emptied,
    eventually,
    ip,
    kernel,
    legacy,
    manifest,
    nft,
    observed,
    pod,
    run,
    saved,
    using,
    vm,
    wanted,
    within,
)

DESKTOP = vm("desktop", "1000-8000,1000-8000/udp")


@pytest.fixture(scope="module", params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test is run with each backend."""
    with using(request.param) as asked_for:
        yield asked_for


@pytest.fixture(scope="module")
def only(backend: str) -> Iterator[str]:
    with pod() as name:
        yield name


@pytest.fixture
def netns(only: str) -> str:
    """For tests that leave its links as they are."""
    return emptied(only)


@pytest.fixture
def arena(netns: str) -> Arena:
    """The same, with a stranger in it."""
    return NftablesArena(netns) if asked() == NFTABLES else IptablesArena(netns)


@pytest.fixture
def fragile() -> Iterator[str]:
    """For tests that do not."""
    with pod() as name:
        yield name


class Haunted:
    """A namespace in which something happens between our look and our commit, with no lock that
    would keep others of us away."""

    backend = reason = identity = ""
    nsid = generation = known = None
    legacy = b""

    def __init__(self, namespace: Namespace, haunt: Callable[[int], None]) -> None:
        self._namespace = namespace
        self._haunt = haunt
        self.commits = 0

    def surroundings(self) -> Surroundings:
        return self._namespace.surroundings()

    def filters(self) -> tuple[Filter, ...]:
        return self._namespace.filters()

    def node(self, endpoints: Iterable[Address], *, others: bool) -> Node:
        return self._namespace.node(endpoints, others=others)

    def observe(self, sysctls: Iterable[str] = ()) -> Observed:
        return self._namespace.observe(sysctls)

    def commit(self, plan: Plan) -> None:
        self.commits += 1
        assert self.commits < 50, "without end"
        self._haunt(self.commits)
        self._namespace.commit(plan)

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sweep(
        self, rules: Iterable[Rule], sets: Mapping[Peers, Members], guests: Set[Address]
    ) -> None:
        self._namespace.sweep(rules, sets, guests)


def haunted_converge(netns: str, machine: Machine | None, haunt: Callable[[int], None]) -> int:
    """Converge while somebody haunts; how many commits it took."""
    desired = wanted(netns, [machine]) if machine else Desired()
    with kernel(asked()).opened(netns) as namespace:
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


def once(act: Callable[[], None]) -> Callable[[int], None]:
    """A stranger who does this before our first commit, and then lets us be."""

    def haunt(commit: int) -> None:
        if commit == 1:
            act()

    return haunt


Stranger = Callable[[Arena], None]


def with_nft(script: str) -> Stranger:
    return lambda arena: nft(arena.name, script)


def with_iptables(*lines: str) -> Stranger:
    return lambda arena: legacy(arena.name, *lines, families=[Family.IP])


def flushes_and_scribbles(arena: Arena) -> None:
    if asked() == NFTABLES:
        nft(arena.name, "flush chain inet portranger prerouting")
    else:
        legacy(arena.name, "-F PORTRANGER-PREROUTING")
    arena.scribble()


JUMP = "-m comment --comment portranger -j PORTRANGER-PREROUTING"
STRANGERS: dict[str, Stranger] = {
    "flushes our rules": lambda arena: arena.flush(),
    "deletes all of it": lambda arena: arena.drop(),
    "scribbles into it": lambda arena: arena.scribble(),
    "flushes a chain and scribbles": flushes_and_scribbles,
}
STRANGERS_OF: dict[str, dict[str, Stranger]] = {
    NFTABLES: {
        **STRANGERS,
        "puts it to sleep": with_nft("add table inet portranger { flags dormant; }"),
        "adds a chain": with_nft("add chain inet portranger extra"),
        "deletes a chain": with_nft(
            "flush chain inet portranger output\ndelete chain inet portranger output"
        ),
        "gives a chain another priority": with_nft(
            "flush chain inet portranger output\ndelete chain inet portranger output\n"
            "add chain inet portranger output { type nat hook output priority -7; }"
        ),
    },
    IPTABLES: {
        **STRANGERS,
        "takes our jump away": with_iptables(f"-D PREROUTING {JUMP}"),
        "jumps to us twice": with_iptables(f"-I PREROUTING {JUMP}"),
        "comes before us": with_iptables("-I PREROUTING -s 203.0.113.7 -j ACCEPT"),
        "sends only some to us": with_iptables(
            f"-D PREROUTING {JUMP}", "-I PREROUTING -s 203.0.113.7 -j PORTRANGER-PREROUTING"
        ),
        "deletes a chain": with_iptables(
            "-D OUTPUT -m comment --comment portranger -j PORTRANGER-OUTPUT",
            "-F PORTRANGER-OUTPUT",
            "-X PORTRANGER-OUTPUT",
        ),
        "renames a chain": with_iptables("-E PORTRANGER-OUTPUT ELSEWHERE"),
        "adds a chain": with_iptables("-N PORTRANGER-EXTRA", "-A PORTRANGER-EXTRA -j ACCEPT"),
    },
}
HARM = {
    NFTABLES: with_nft("add counter inet portranger odd"),
    IPTABLES: with_iptables(f"-I PREROUTING {JUMP}"),
}


def per_backend(acts: dict[str, dict[str, Stranger]]) -> pytest.MarkDecorator:
    """Each of these strangers, with the backend that he knows."""
    return pytest.mark.parametrize(
        ("backend", "stranger"),
        [
            pytest.param(backend, act, id=f"{backend}-{name}")
            for backend, named in acts.items()
            for name, act in named.items()
        ],
        indirect=["backend"],
    )


@per_backend(STRANGERS_OF)
@pytest.mark.parametrize(
    "after", [vm("desktop", "1000-5000,22/udp"), None], ids=["editing", "removing"]
)
@pytest.mark.parametrize("harmed", [False, True], ids=["whole", "harmed"])
def test_a_stranger_who_edits_between_look_and_commit_is_overruled(
    arena: Arena, stranger: Stranger, after: Machine | None, harmed: bool
) -> None:
    applied(arena.name, DESKTOP)
    if harmed:
        HARM[asked()](arena)
    commits = haunted_converge(arena.name, after, once(lambda: stranger(arena)))
    assert commits <= 3
    assert_holds(arena.name, *([after] if after else []))


APPEAR: dict[str, dict[str, Stranger]] = {
    NFTABLES: {
        "empty": with_nft("add table inet portranger"),
        "with a chain": with_nft("add table inet portranger; add chain inet portranger extra"),
        "asleep": with_nft("add table inet portranger { flags dormant; }"),
        "with a chain of ours": with_nft(
            "add table inet portranger; add chain inet portranger output"
        ),
    },
    IPTABLES: {
        "empty": with_iptables("-N PORTRANGER-PREROUTING"),
        "with a chain": with_iptables("-N PORTRANGER-EXTRA"),
        "with its jump": with_iptables("-N PORTRANGER-PREROUTING", f"-I PREROUTING {JUMP}"),
        "with a jump that is not ours": with_iptables(
            "-N PORTRANGER-OUTPUT", "-A OUTPUT -j PORTRANGER-OUTPUT"
        ),
    },
}


@per_backend(APPEAR)
def test_a_table_that_appears_between_look_and_commit_is_taken_over(
    arena: Arena, stranger: Stranger
) -> None:
    haunted_converge(arena.name, DESKTOP, once(lambda: stranger(arena)))
    assert_holds(arena.name, DESKTOP)


def scribbles_another(arena: Arena, commit: int) -> None:
    """The rule that we are about to remove becomes another one."""
    if asked() == IPTABLES:
        line = f"-R PORTRANGER-PREROUTING 1 -p tcp -m tcp --dport {100 + commit} -j ACCEPT"
        legacy(arena.name, line, families=[Family.IP])
        return
    (foreign,) = observed(arena.name).foreign
    nft(arena.name, f"delete rule inet portranger prerouting handle {foreign.handle}")
    arena.scribble()


def test_a_stranger_in_every_window_makes_us_give_up_and_say_so(arena: Arena) -> None:
    netns = arena.name
    applied(netns, DESKTOP)
    arena.scribble()
    with pytest.raises(TryAgain, match="somebody else keeps changing our table") as refusal:
        haunted_converge(netns, DESKTOP, lambda commit: scribbles_another(arena, commit))
    assert refusal.value.exit_code == 75
    applied(netns, DESKTOP)
    assert_holds(netns, DESKTOP)


class Undone(Haunted):
    """A namespace in which somebody scribbles after each of our commits."""

    def observe(self, sysctls: Iterable[str] = ()) -> Observed:
        self._haunt(self.commits)
        return super().observe(sysctls)

    def commit(self, plan: Plan) -> None:
        self.commits += 1
        self._namespace.commit(plan)


def test_a_stranger_who_undoes_every_commit_makes_us_give_up_and_say_what_is_left(
    arena: Arena,
) -> None:
    netns = arena.name
    applied(netns, DESKTOP)
    desired = wanted(netns, [DESKTOP])
    with kernel(asked()).opened(netns) as namespace:
        undone = Undone(namespace, lambda _: arena.scribble())
        with pytest.raises(Failure, match=r"(?i)a foreign rule in .*prerouting") as refusal:
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
        with kernel(asked()).opened(name) as namespace:
            haunted = Haunted(namespace, lambda _: _deleted(name))
            converge(name, desired, haunted)  # it lives on while we hold it open
        with pytest.raises(NoNamespace), kernel(asked()).opened(name):
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
        code = apply(["-"], console, kernel=kernel(asked()), confirm=confirm)
        assert code == 75
        assert f"there is no network namespace {gone}" in err.getvalue()
        assert f"Applied in namespace {there}" in out.getvalue()
        assert len(observed(there).live) > 0


def test_a_link_that_vanishes_before_its_setting_is_made_is_said_so(fragile: str) -> None:
    desired = wanted(fragile, [DESKTOP])
    ip(fragile, "link del k6t-eth0")
    with kernel(asked()).opened(fragile) as namespace:
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
netns, backend, *sides = sys.argv[1:]
deadline = time.monotonic() + 120
with LiveKernel(backend).opened(netns) as namespace:
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
KILLS = {NFTABLES: 20, IPTABLES: 4}


def test_a_kill_at_any_point_leaves_the_old_ruleset_or_the_new_one_whole(netns: str) -> None:
    """Where a backend commits a family at a time, this holds of each family."""
    seed = random.randrange(1 << 30)
    print("seed", seed)  # noqa: T201 - to repeat a failure
    chance = random.Random(seed)
    whole = [parts_of(wanted(netns, [vm("desktop", side)]).rules) for side in SIDES]
    applied(netns, vm("desktop", SIDES[0]))
    found: Counter[int] = Counter()
    for number in range(KILLS[asked()]):
        # Every other time right after a commit: so both sides are met with, whatever the times.
        kill_while_it_commits(netns, 2 + number // 2 % 2, number % 2 * chance.random())
        seen = observed(netns)
        for part, rules in parts_of(live.rule for live in seen.live).items():
            assert rules in [side[part] for side in whole], f"half of it, with seed {seed}"
            found[[side[part] for side in whole].index(rules)] += 1
        assert not seen.foreign
        assert not seen.unsound
        applied(netns, vm("desktop", SIDES[chance.randrange(2)]))
    assert len(found) == 2, f"every kill fell into the same half: {found}, with seed {seed}"
    applied(netns, vm("desktop", SIDES[0]))
    assert_holds(netns, vm("desktop", SIDES[0]))


def parts_of(rules: Iterable[Rule]) -> dict[str, Counter[Rule]]:
    """What is committed at once."""
    parts: dict[str, Counter[Rule]] = {}
    for rule in rules:
        part = rule.family.value if asked() == IPTABLES else "all"
        parts.setdefault(part, Counter())[rule] += 1
    return parts


def kill_while_it_commits(netns: str, commits: int, part: float) -> None:
    """Run a process that commits one thing after another, let it do so many commits, and kill it
    after a part of the time that one takes."""
    child = subprocess.Popen(
        [sys.executable, "-c", STREAM, netns, asked(), *SIDES], cwd=ROOT, stdout=subprocess.PIPE
    )
    workers: list[str] = []
    try:
        assert child.stdout is not None
        took = 0.0
        for _ in range(commits):
            started = time.monotonic()
            assert select.select([child.stdout], [], [], 60)[0], "it commits no more"
            assert os.read(child.stdout.fileno(), 1) == b"."
            took = time.monotonic() - started
        workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        assert len(workers) == (2 if asked() == IPTABLES else 1)
        time.sleep(part * took)
        assert child.poll() is None, "it ended by itself"
    finally:
        child.kill()
        child.communicate(timeout=30)
    for worker in workers:  # each ends by itself, after what it had been told to do
        assert eventually(lambda pid=worker: has_ended(pid)), "a worker outlived its master"  # type: ignore[misc]


def has_ended(pid: str) -> bool:
    """Whether the process is gone, or waits only for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


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
def test_without_libnftables_the_command_says_what_to_install_or_does_without(
    netns: str, words: tuple[str, ...]
) -> None:
    code, said = in_a_room(
        f"mount --bind /dev/null {library()}",
        words=[*(word.format(netns) for word in words), "--backend", asked()],
        stdin=manifest(netns, "22"),
    )
    if asked() == IPTABLES:
        assert (code, said) == (0, "")
    else:
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
        *READ_ONLY,
        words=("apply", "--yes", "-f", "-", "--backend", asked()),
        stdin=manifest(netns, "22"),
    )
    assert code == 77, said
    assert "/proc/sys" in said
    assert not observed(netns).table


def test_where_settings_are_read_only_but_made_already_rules_are_applied(netns: str) -> None:
    applied(netns, vm("desktop", "22"))
    code, said = in_a_room(
        *READ_ONLY,
        words=("apply", "--yes", "-f", "-", "--backend", asked()),
        stdin=manifest(netns, "23"),
    )
    assert code == 0, said
    assert_holds(netns, vm("desktop", "23"))


def test_a_read_only_machine_can_still_be_asked(netns: str) -> None:
    code, said = in_a_room(
        *READ_ONLY, words=("plan", "-f", "-", "--backend", asked()), stdin=manifest(netns, "22")
    )
    assert code == 0, said


SCARCE = """
import ctypes, os, resource, sys
from agent.errors import Failure
from agent.kernel.live import LiveKernel
from agent.reconcile import ATTEMPTS, converge
from rules.desired import desire
from tests.spaces import vm
netns, loaded, backend = sys.argv[1:]
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
        with LiveKernel(backend).opened(netns) as namespace:
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
    done = run(sys.executable, "-c", SCARCE, netns, loaded, asked(), code=None)
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


def test_what_the_worker_says_is_told_apart_too() -> None:
    assert isinstance(iptables_failure("Stale", "our chains changed"), Stale)
    assert isinstance(iptables_failure("IPTCError", "Resource temporarily unavailable"), Stale)
    assert isinstance(iptables_failure("BlockingIOError", "the lock is held"), Stale)
    assert iptables_failure("IPTCError", "Permission denied (you must be root)").exit_code == 77
    assert iptables_failure("XTablesError", "can't find target DNAT: not found").exit_code == 69
    assert iptables_failure("IPTCError", "something new").exit_code == 1


def test_a_plan_that_the_kernel_refuses_changes_nothing(netns: str) -> None:
    applied(netns, DESKTOP)
    before = observed(netns)
    with kernel(asked()).opened(netns) as namespace:
        desired = desire([DESKTOP], namespace.surroundings())
        rule = next(iter(desired.rules))
        plan = Plan(netns=netns, add=(replace(rule, interface="a name too long for a link"),))
        assert not namespace.observe().foreign
        with pytest.raises(Failure) as refusal:
            namespace.commit(plan)
    assert refusal.value.exit_code in (1, 75)
    assert observed(netns) == before
    tables = "table inet portranger\n" if asked() == NFTABLES else ""
    assert within(netns, "nft", "list", "tables") == tables
    assert ("PORTRANGER" in saved(netns)) == (asked() == IPTABLES)
