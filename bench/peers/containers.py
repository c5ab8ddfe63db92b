"""What publishes the ports of containers: netavark, CNI's portmap, podman, pasta."""

import functools
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

from bench.peers.peer import Doing, Peer, Sample, Step, Work
from bench.peers.place import FIRST, GUEST_ADDRESS, LAST, Place
from bench.peers.tables import PROTOCOLS, SAMPLE
from bench.process import until

Mapping = tuple[str, int, int, int]  # protocol, the node's first port, the guest's, how many
WHOLE: tuple[Mapping, ...] = tuple((one, FIRST, FIRST, LAST - FIRST + 1) for one in PROTOCOLS)
LONGER = (("tcp", FIRST, FIRST, LAST - FIRST + 2), WHOLE[1])
SHIFTED: tuple[Mapping, ...] = tuple((one, 9000, 7000, 10) for one in PROTOCOLS)
LISTED = tuple((one, p, p, 1) for one in PROTOCOLS for p in range(FIRST, FIRST + SAMPLE))
LISTED_LONGER = (*LISTED, ("tcp", FIRST + SAMPLE, FIRST + SAMPLE, 1))
NETAVARK, PORTMAP = "/usr/lib/podman/netavark", "/usr/lib/cni/portmap"
_SAMPLED = Sample(SAMPLE, (LAST - FIRST + 1) / SAMPLE)
AGAIN = "none while it runs, so removed and set up again"


def _in_turn(*steps: Step) -> Step:
    def all_of_them() -> None:
        for step in steps:
            step()

    return all_of_them


@contextmanager
def netavark(place: Place, listed: bool = False) -> Work:
    """The pod is its host, the guest its container, on a bridge that it makes by itself."""
    before, after = (LISTED, LISTED_LONGER) if listed else (WHOLE, LONGER)
    place.ip(place.lab.guest, "link del eth0")

    def step(action: str, name: str, mappings: Iterable[Mapping]) -> Step:
        file = place.folder / f"{name}.json"
        file.write_text(json.dumps(_netavark_options(mappings)))
        words = (NETAVARK, "--config", str(place.folder / "netavark"), "--file", str(file))
        return functools.partial(place.run, *words, action, f"/run/netns/{place.lab.guest}")

    state = {"now": before}  # a teardown is told what was set up

    def remove() -> None:
        name = "before" if state["now"] == before else "after"
        step("teardown", name, state["now"])()
        state["now"] = before

    def change() -> None:
        step("teardown", "before", before)()
        state["now"] = after
        step("setup", "after", after)()

    yield Doing(
        set_up=step("setup", "before", before),
        change=change,
        remove=remove,
        shift=step("setup", "shifted", SHIFTED),
        unshift=step("teardown", "shifted", SHIFTED),
        sample=_SAMPLED if listed else None,
        guest_stays=False,
    )


def _netavark_options(mappings: Iterable[Mapping]) -> object:
    subnet = {"subnet": "10.0.3.0/24", "gateway": "10.0.3.1"}
    network = {
        "name": "peer",
        "id": "0123456789abcdef" * 4,
        "driver": "bridge",
        "network_interface": "podman7",
        "subnets": [subnet],
        "ipv6_enabled": False,
        "internal": False,
        "dns_enabled": False,
        "ipam_options": {"driver": "host-local"},
    }
    return {
        "container_id": "fedcba9876543210" * 4,
        "container_name": "peer",
        "port_mappings": [
            {"host_ip": "", "protocol": one, "host_port": host, "container_port": to, "range": many}
            for one, host, to, many in mappings
        ],
        "networks": {"peer": {"interface_name": "eth0", "static_ips": ["10.0.3.2"]}},
        "network_info": {"peer": network},
    }


@contextmanager
def portmap(place: Place) -> Work:
    """The plugin alone, told that another one has wired the guest. It knows no ranges."""

    def step(command: str, mappings: Iterable[Mapping]) -> Step:
        sandbox = f"/run/netns/{place.lab.guest}"
        variables = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": "peer",
            "CNI_NETNS": sandbox,
            "CNI_IFNAME": "eth0",
            "CNI_PATH": str(Path(PORTMAP).parent),
        }
        stdin = json.dumps(_portmap_configuration(sandbox, mappings))
        return functools.partial(place.run, PORTMAP, stdin=stdin, environment=variables)

    remove = step("DEL", LISTED_LONGER)
    shifted = tuple((one, h + i, to + i, 1) for one, h, to, many in SHIFTED for i in range(many))
    yield Doing(
        set_up=step("ADD", LISTED),
        change=_in_turn(remove, step("ADD", LISTED_LONGER)),
        remove=remove,
        shift=step("ADD", shifted),
        unshift=step("DEL", shifted),
        sample=_SAMPLED,
    )


def _portmap_configuration(sandbox: str, mappings: Iterable[Mapping]) -> object:
    return {
        "cniVersion": "0.4.0",
        "name": "peer",
        "type": "portmap",
        "runtimeConfig": {
            "portMappings": [
                {"hostPort": host, "containerPort": to, "protocol": one}
                for one, host, to, _ in mappings
            ]
        },
        "prevResult": {
            "cniVersion": "0.4.0",
            "interfaces": [{"name": "eth0", "sandbox": sandbox}],
            "ips": [{"version": "4", "interface": 0, "address": f"{GUEST_ADDRESS}/24"}],
        },
    }


@contextmanager
def pasta(place: Place) -> Work:
    """A process that holds a socket per port, and gives the guest a link of its own."""
    place.ip(place.lab.guest, "link del eth0")
    names = ("pasta", "passt", "passt.avx2")  # what it becomes depends on the processor
    with place.holder() as holder:

        def start(tcp: str, udp: str) -> Step:
            words = ("pasta", "--quiet", "--runas", "0", "--config-net", "--no-map-gw")
            guest = ("--ns-ifname", "eth0", "--netns", f"/run/netns/{place.lab.guest}")
            ports = ("--tcp-ports", tcp, "--udp-ports", udp, "--tcp-ns", "none", "--udp-ns", "none")
            return lambda: holder.run(*words, *guest, *ports, log=place.folder / "log")

        def stop() -> None:
            for pid in holder.named(*names):
                os.kill(pid, signal.SIGTERM)
            until(lambda: not holder.named(*names))

        plain, shifted = f"{FIRST}-{LAST}", "9000-9009:7000-7009"
        yield Doing(
            set_up=start(plain, plain),
            change=_in_turn(stop, start(f"{FIRST}-{LAST + 1}", plain)),
            remove=stop,
            shift=start(shifted, shifted),
            unshift=stop,
            memory=lambda: holder.memory(*names),
            flows=False,
        )


@contextmanager
def podman(place: Place) -> Work:
    """A container that sleeps, in storage, configuration and mounts of its own."""
    folder = place.folder
    root = _sleeping_root(folder / "root")
    settings = folder / "containers.conf"
    settings.write_text(
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\n'
        f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{folder}/networks"\n'
    )
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with place.holder(
        "mount -t tmpfs tmpfs /run", "mount -t cgroup2 cgroup2 /sys/fs/cgroup"
    ) as holder:

        def step(*words: str) -> Step:
            where = [f"--{name}={folder}/{name}" for name in ("root", "runroot", "tmpdir")]
            where[0] = f"--root={folder}/storage"
            whole = ("podman", *where, "--storage-driver=vfs", *words)
            return lambda: holder.run(*whole, log=folder / "log", CONTAINERS_CONF=str(settings))

        def start(mappings: Iterable[Mapping]) -> Step:
            published = [
                f"--publish={host}-{host + many - 1}:{to}-{to + many - 1}/{one}"
                for one, host, to, many in mappings
            ]
            free = ("--cgroups=disabled", f"--ulimit=nofile={most}:{most}", "--ulimit=nproc=4096")
            sleep = ("--rootfs", str(root), "/bin/sleep", "600")
            return step("run", "--detach", "--name=peer", *free, *published, *sleep)

        remove = step("rm", "--force", "--time=0", "peer")
        yield Doing(
            set_up=start(WHOLE),
            change=_in_turn(remove, start(LONGER)),
            remove=remove,
            shift=start(SHIFTED),
            unshift=remove,
            memory=lambda: holder.memory("conmon"),
            reload=step("network", "reload", "peer"),
            guest=lambda: f"/proc/{holder.child_of('conmon')}/ns/net",
            guest_stays=False,
            flows=False,
        )


def _sleeping_root(root: Path) -> Path:
    """A root file system with `sleep` and what it is linked with."""
    for name in ("bin", "proc", "dev", "sys", "etc", "run", "tmp"):
        (root / name).mkdir(parents=True)
    linked = subprocess.run(["ldd", "/bin/sleep"], capture_output=True, text=True, check=True)
    libraries = [word for word in linked.stdout.split() if word.startswith("/")]
    for file in ("/bin/sleep", *libraries):
        copy = root / file.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return root


PEERS = (
    Peer(
        name="netavark, ranges",
        needs=("netavark", "iptables"),
        at_work=netavark,
        how="as podman calls it, with the container's bridge and link",
        no_change=AGAIN,
    ),
    Peer(
        name="netavark, per port",
        needs=("netavark", "iptables"),
        at_work=functools.partial(netavark, listed=True),
        how="a mapping per port",
        no_change=AGAIN,
    ),
    Peer(
        name="CNI portmap",
        needs=("portmap", "iptables"),
        at_work=portmap,
        how="it knows no ranges: a mapping per port",
        no_change=AGAIN,
    ),
    Peer(
        name="podman run / rm",
        needs=("podman", "conmon", "crun", "netavark"),
        at_work=podman,
        how="a container with it",
        no_change=AGAIN,
    ),
    Peer(
        name="pasta",
        needs=("pasta",),
        at_work=pasta,
        how="a process that relays, in user space",
        no_change=AGAIN,
    ),
)
