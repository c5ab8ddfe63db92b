"""`make bench`: what changing a range costs and what a flow through it, how fast the dry run of a
pipeline is, how soon the daemon acts and what it uses. `make bench ARGS=daemon` runs the sections
whose names begin so; with --write, docs/bench and the README's table are renewed. Where a number
breaks its bound, that is a failure. `make bench-quick` runs a section of its own, and `make bench
ARGS=hitless` tells whether changes lose flows (see bench/hitless.py for its options).
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path

from agent.kernel.lab import POD, built
from agent.kernel.live import LiveKernel
from agent.kernel.netns import inside, opened
from agent.kernel.probe import connected
from agent.reconcile import converge
from bench import control, flows, headline, hitless, kubernetes, report, services
from bench.crowd import crowd, some
from bench.daemon import arrival_to_port, flush_to_port, save_to_port
from bench.flush import repair_elsewhere
from bench.machines import machine
from bench.measure import Action, Table, interleaved, table
from bench.quick import quick
from rules import nft_script
from rules.desired import desire
from rules.model import Claim, Guest, Machine, Protocol
from rules.plan import diff
from rules.ports import PortRange

EXAMPLE = Path(__file__).parent.parent / "examples" / "desktop.yaml"
ROUNDS = 60
WRITE, QUICK, HITLESS = "--write", "quick", "hitless"


def main(words: Sequence[str]) -> None:
    """Print every table that is asked for, or all."""
    signal.signal(signal.SIGTERM, _ending(os.getpid()))
    if words[:1] == [HITLESS]:
        hitless.main(words[1:])
        return
    wanted = [word for word in words if word != WRITE]
    strange = [word for word in wanted if not _named([word])]
    known = ", ".join([*SECTIONS, HITLESS])
    if strange:
        sys.exit(f"bench: no section begins with {strange[0]}; there are: {known}")
    found: dict[str, Table] = {}
    for name in _named(wanted):
        found[name] = SECTIONS[name]()
        print("\n".join(found[name].lines), end="\n\n", flush=True)
    if WRITE in words:
        for file in (*report.write(found), headline.renew()):
            print(f"bench: wrote {file.relative_to(report.FOLDER.parents[1])}")
    if not all(made.kept for made in found.values()):
        sys.exit("bench: a bound is broken")


def _ending(pid: int) -> Callable[[int, object], None]:
    """Take down what was built, where it was built: pyroute2 ends processes that it forked off us
    by a signal, and these must leave it alone."""

    def end(number: int, _: object) -> None:
        if os.getpid() == pid:
            sys.exit(128 + number)
        os._exit(128 + number)

    return end


def _named(words: Sequence[str]) -> list[str]:
    """What repeats others in short is only run by its name."""
    if not words:
        return [name for name in SECTIONS if name != QUICK]
    return [name for name in SECTIONS if name.startswith(tuple(words))]


def change_one_range() -> Table:
    """Desired state known to rules effective and checked, against nft given a ready script."""
    return _change("Change the range tcp 1000-8000 of the example", (8000, 8001), others=0)


def change_with_flows_open() -> Table:
    """The same while the namespace has flows: nft leaves those of closed ports open, we do not."""
    return _change("The same, with 50 UDP flows open", (8000, 8001), others=0, flows=50)


def change_one_of_fifty() -> Table:
    """The same beside other ranges, which stay as they are and must be looked at."""
    return _change("Change one of fifty ranges", (1005, 1006), others=49)


def _change(title: str, lasts: tuple[int, int], others: int, flows: int = 0) -> Table:
    with (
        built(f"prbench-{os.getpid()}") as lab,
        opened(lab.pod) as descriptor,
        LiveKernel().opened(lab.pod) as namespace,
        ExitStack() as stack,
        tempfile.TemporaryDirectory() as folder,
    ):
        links = namespace.surroundings()
        states = itertools.cycle([desire([_machine(last, others)], links) for last in lasts])
        converge(lab.pod, next(states), namespace)
        for number in range(flows):
            flow = connected(lab, lab.client, POD[0].ip, Protocol.UDP, 2000 + number)
            stack.enter_context(flow).send(b"open")
        script = Path(folder, "change.nft")

        def write_script() -> None:
            script.write_text(nft_script.script(diff(lab.pod, next(states), namespace.observe())))

        def run_nft() -> None:
            with inside(descriptor, lab.pod):
                subprocess.run(["nft", "-f", str(script)], check=True)

        def run_portranger() -> None:
            converge(lab.pod, next(states), namespace)

        actions: dict[str, Action] = {
            "nft -f, a process": (write_script, run_nft),
            "portranger, in process": (namespace.observe, run_portranger),  # as its events would
        }
        taken = interleaved(actions, ROUNDS)
    return table(title, taken)


def _machine(last: int, others: int) -> Machine:
    """A range from 1000 to `last` beside others of TCP, and one of UDP."""
    claims = [
        Claim(Protocol.TCP, PortRange(1000, last)),
        Claim(Protocol.UDP, PortRange(1000, 8000)),
    ]
    claims += [
        Claim(Protocol.TCP, PortRange(first, first + 9))
        for first in range(20000, 20000 + 20 * others, 20)
    ]
    guests = ("10.0.2.2", "10.0.2.1"), ("fd10:0:2::2", "fd10:0:2::1")
    return machine(claims, [Guest(ip_address(one), ip_address(two)) for one, two in guests])


def dry_run() -> Table:
    """A whole command, against starting Python alone."""
    portranger = str(Path(sys.executable).parent / "portranger")
    commands = {
        "python3 -c pass": [sys.executable, "-c", "pass"],
        "plan --against empty": [portranger, "plan", "--against", "empty", "-f", str(EXAMPLE)],
        "portranger --help": [portranger, "--help"],
    }
    actions: dict[str, Action] = {name: (_nothing, _running(c)) for name, c in commands.items()}
    return table("Start, plan an example, end", interleaved(actions, ROUNDS))


def _running(command: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _nothing() -> None:
    """Nothing to prepare."""


SECTIONS = {
    "change": change_one_range,
    "change-with-flows": change_with_flows_open,
    "change-of-fifty": change_one_of_fifty,
    "command": dry_run,
    "daemon-save": save_to_port,
    "daemon-flush": flush_to_port,
    "daemon-arrival": arrival_to_port,
    "daemon-some": some,
    "daemon-crowd": crowd,
    "control-range": control.one_range,
    "control-ports": control.any_ports,
    "control-many": control.many_ranges,
    "control-one-of": control.one_of_many,
    "control-manifests": control.manifests,
    "flows-udp": flows.udp,
    "flows-tcp": flows.tcp,
    "flows-crossover": flows.crossover,
    "flows-stream": flows.stream,
    "services-flows": services.flows,
    "flush-repair": repair_elsewhere,
    "kubernetes-edit": kubernetes.edit_to_port,
    "kubernetes-cost": kubernetes.cost,
    QUICK: quick,
}

if __name__ == "__main__":
    main(sys.argv[1:])
