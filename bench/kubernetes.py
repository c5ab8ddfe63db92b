"""The agent on a node of a real API server: how soon an edit there is a port here, and what the
agent costs the API server and the node. Needs what `make kube-assets` builds."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agent.kernel.lab import POD, Lab, built
from agent.kernel.probe import echoing, reached
from bench.measure import Number, Table, numbers
from bench.process import until
from rules.model import Protocol
from tests.daemon.running import Running
from tests.kubernetes.agents import Agents, agents
from tests.kubernetes.cluster import Cluster, running, why_not
from tests.kubernetes.instances import Machines, instance, pod_uid, realistic
from tests.launcher import launcher

EDITS = 30
EDIT_BOUND = 150.0  # ms
INSTANCES = 200
MEMORY_BOUND = 100.0  # MiB
IDLE = 20.0  # seconds
PORT = 5000
OPEN, SHUT = "1000-8000", "22"


@contextmanager
def node() -> Iterator[tuple[Cluster, Machines, Agents]]:
    """A cluster with a namespace, and a node of it."""
    if reason := why_not():
        raise SystemExit(f"bench: {reason}")
    with (
        tempfile.TemporaryDirectory() as folder,
        running() as cluster,
        cluster.namespace() as namespace,
        agents(cluster, Path(folder), "node") as made,
    ):
        yield cluster, Machines(cluster, namespace), made


def edit_to_port() -> Table:
    """An annotation is edited, until a connection to a new port is answered by the guest."""
    uid = pod_uid()
    taken: list[float] = []
    with (
        node() as (_, machines, made),
        built(f"prbench-{os.getpid()}") as lab,
        launcher(made.kubelet, uid, lab.pod),
        made.daemons.running(),
        echoing(lab, lab.guest, [(Protocol.TCP, PORT)]),
    ):
        machines.make(instance("vm", made.name, SHUT, pods={uid: made.name}))
        for _ in range(EDITS):
            machines.annotate("vm", port_ranges=SHUT)
            until(lambda: not _answers(lab))
            started = time.monotonic()
            machines.annotate("vm", port_ranges=OPEN)
            until(lambda: _answers(lab))
            taken.append((time.monotonic() - started) * 1000)
    return numbers(
        Table(("An annotation is edited, until a port of it can be reached",)),
        [
            Number(name="median", value=statistics.median(taken), unit="ms", bound=EDIT_BOUND),
            Number(name="longest", value=max(taken), unit="ms"),
        ],
    )


def _answers(lab: Lab) -> bool:
    return reached(lab, lab.client, POD[0].ip, Protocol.TCP, PORT) == PORT


def cost() -> Table:
    """Of one agent with many instances of 30 KB each: to the API server and to its node."""
    with node() as (_, machines, made), ExitStack() as stack:
        machines.make_all([realistic(f"vm-{one}", made.name) for one in range(INSTANCES)])
        daemon = stack.enter_context(made.daemons.running())
        until(lambda: daemon.metric("manifests") == INSTANCES)
        start = _traffic(daemon)
        machines.annotate("vm-0", port_ranges="7000")
        until(lambda: _traffic(daemon)[1] > start[1])
        edit = _traffic(daemon)
        time.sleep(IDLE)
        machines.annotate("vm-0", port_ranges="7001")
        until(lambda: _traffic(daemon)[1] > edit[1])
        idle = _traffic(daemon)
        memory = daemon.metric("process_resident_memory_bytes") / 2**20
    return numbers(
        Table((f"One agent with {INSTANCES} instances of 30 KB each",)),
        [
            Number(name="requests to start", value=start[0], unit=""),
            Number(name="received to start, in KiB", value=start[1] / 1024, unit=""),
            Number(name="requests for an edit", value=edit[0] - start[0], unit=""),
            Number(name="received for an edit, in KiB", value=(edit[1] - start[1]) / 1024, unit=""),
            Number(
                name=f"requests for {IDLE:.0f} s of nothing and an edit",
                value=idle[0] - edit[0],
                unit="",
            ),
            Number(name="resident", value=memory, unit="MiB", bound=MEMORY_BOUND),
        ],
    )


def _traffic(daemon: Running) -> tuple[float, float]:
    """Requests and bytes up to now."""
    return (
        daemon.metric("kubernetes_requests_total"),
        daemon.metric("kubernetes_received_bytes_total"),
    )
