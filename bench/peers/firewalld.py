"""firewalld, asked over D-Bus: a bus and a daemon of their own inside the pod's namespace."""

import functools
import json
import subprocess
import time
from contextlib import ExitStack, contextmanager

from bench.peers.peer import Doing, Peer, Step, Work
from bench.peers.place import FIRST, GUEST_ADDRESS, LAST, Holder, Place, Unavailable
from bench.peers.tables import PROTOCOLS
from bench.process import PATIENCE

DEBIAN_PYTHON = "/usr/bin/python3"  # whose D-Bus module firewalld itself uses
# A line in is a list of calls, each with its interface; a line out says that all are done.
CLIENT = """
import dbus, json, sys
name = "org.fedoraproject.FirewallD1"
firewall = dbus.SystemBus().get_object(name, "/org/fedoraproject/FirewallD1")
for line in sys.stdin:
    try:
        for interface, method, arguments in json.loads(line):
            firewall.get_dbus_method(method, name + interface)(*arguments)
        print("done", flush=True)
    except dbus.DBusException as error:
        print(str(error).replace("\\n", " "), flush=True)
"""
MOUNTS = (
    "for place in /run /etc/firewalld /var/log; do mount -t tmpfs tmpfs $place; done",
    "mkdir -p /run/dbus",
    "dbus-daemon --system --nopidfile --fork >&2",
    "firewalld --nofork --nopid --log-target console >/dev/null 2>&1 </dev/null &",
)
Call = tuple[str, str, list[object]]


class Client:
    """A connection to its bus that stays open, as that of a program would."""

    def __init__(self, holder: Holder, stack: ExitStack) -> None:
        self._child = subprocess.Popen(
            holder.words(DEBIAN_PYTHON, "-c", CLIENT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # until firewalld is there it ends with a page of words
            text=True,
        )
        stack.callback(self._child.communicate, timeout=PATIENCE)

    def ask(self, *calls: Call) -> str:
        assert self._child.stdin
        assert self._child.stdout
        print(json.dumps(calls), file=self._child.stdin, flush=True)
        return self._child.stdout.readline().strip() or "its client ended"

    def do(self, *calls: Call) -> None:
        said = self.ask(*calls)
        if said != "done":
            raise Unavailable(f"firewalld says {said}")


@contextmanager
def firewalld(place: Place) -> Work:
    with place.holder(*MOUNTS) as holder, ExitStack() as stack:
        client = _ready(holder, stack)

        def step(*calls: Call) -> Step:
            return functools.partial(client.do, *calls)

        plain, longer = f"{FIRST}-{LAST}", f"{FIRST}-{LAST + 1}"
        shifted = ("9000-9009", "7000-7009")
        yield Doing(
            set_up=step(*(_add(one, plain) for one in PROTOCOLS)),
            change=step(_remove("tcp", plain), _add("tcp", longer)),
            remove=step(_remove("tcp", longer), _remove("udp", plain)),
            shift=step(*(_add(one, *shifted) for one in PROTOCOLS)),
            unshift=step(*(_remove(one, *shifted) for one in PROTOCOLS)),
            memory=lambda: holder.memory("firewalld", "dbus-daemon"),
            reload=step(("", "runtimeToPermanent", []), ("", "reload", [])),
        )


def _ready(holder: Holder, stack: ExitStack) -> Client:
    """A client that firewalld answers."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        once = ExitStack()
        client = Client(holder, once)
        said = client.ask((".zone", "getZones", []))
        if said == "done":
            stack.push(once)
            return client
        once.close()
        time.sleep(0.1)
    raise Unavailable("firewalld did not answer on its bus")


def _add(protocol: str, ports: str, to: str = "") -> Call:
    return (".zone", "addForwardPort", ["", ports, protocol, to, GUEST_ADDRESS, 0])


def _remove(protocol: str, ports: str, to: str = "") -> Call:
    return (".zone", "removeForwardPort", ["", ports, protocol, to, GUEST_ADDRESS])


PEERS = (
    Peer(
        name="firewalld, D-Bus",
        needs=("firewalld", "dbus-daemon"),
        at_work=firewalld,
        how="at run time, over a connection kept open",
    ),
)
