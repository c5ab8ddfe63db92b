"""A real guest, as virt-launcher has it: qemu behind a tap on k6t-eth0, with an address by DHCP.

    client (192.0.2.1) ── eth0 (192.0.2.2) pod k6t-eth0 (10.0.2.1) ── tap0 ── qemu: guest (10.0.2.2)

The client and the pod are throwaway namespaces. What runs in them dies with the process that
started it, however that ends.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.spaces import PATIENCE, eventually, ip, space, within
from tests.vm.image import QEMU, Image

POD = ("192.0.2.2", "2001:db8::2")
CLIENT = ("192.0.2.1", "2001:db8::1")  # as POD: one address a family
MAC = "02:00:00:00:00:02"
READY = "guest: ready"
EMULATION, KVM = "tcg", "kvm"
BOOTS_WITHIN = {EMULATION: 180, KVM: 10}  # seconds; on an idle machine it takes four, with KVM one
# No looking for duplicates of an address, which takes a second; and every refusal is told.
SETTINGS = (
    *("net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0"),
    *("net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0"),
)
LEASES = """\
interface k6t-eth0
start 10.0.2.2
end 10.0.2.2
max_leases 1
lease_file {folder}/leases
pidfile {folder}/pid
option subnet 255.255.255.0
option router 10.0.2.1
option lease 86313600
static_lease {mac} 10.0.2.2
"""


class Guest:
    """A virtual machine in a pod's namespace. It can be stopped and started again."""

    def __init__(self, pod: str, image: Image, ports: Sequence[int], folder: Path) -> None:
        self._pod, self._image, self._ports = pod, image, ports
        self._console, self._complaints = folder / "console", folder / "qemu.log"
        self._console.touch()
        self._accelerator = EMULATION
        self._process: subprocess.Popen[str] | None = None
        self._boots = 0

    @property
    def accelerator(self) -> str:
        """What it runs on."""
        return self._accelerator

    @property
    def release(self) -> str:
        """The release of its kernel, as it says itself."""
        (said,) = {line for line in self.said() if line.startswith("guest: Linux")}
        return said.split()[-1]

    def said(self) -> list[str]:
        """What it wrote on its console."""
        return self._console.read_text(errors="replace").splitlines()

    def start(
        self,
        accelerators: Sequence[str] = (EMULATION,),
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Boot it, by the first of these that works, and tell how it goes."""
        for accelerator in accelerators:
            self._accelerator = accelerator
            tell(f"booting by {accelerator}")
            self._process = self._started()
            if self._comes_up(BOOTS_WITHIN[accelerator]):
                return
            tell(self._complaint())
            self.stop()
        raise AssertionError(self._failure())

    def reboot(self) -> None:
        """As its reset button would."""
        self._tell("system_reset")
        assert self._comes_up(BOOTS_WITHIN[self._accelerator]), self._failure()

    def stop(self) -> None:
        """As its power button would, pressed for long."""
        if self._process:
            self._process.kill()
            self._process.communicate(timeout=PATIENCE)
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        # Appended to, so that what it said before a restart stays.
        console = f"file,id=console,path={self._console},append=on"
        command_line = (
            f"console=ttyS0 quiet mitigations=off ports={','.join(map(str, self._ports))}"
        )
        words = (
            *(QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-sandbox", "on"),
            *("-machine", "q35", "-cpu", "max", "-m", "128", "-accel", self._accelerator),
            *("-chardev", console, "-serial", "chardev:console", "-monitor", "stdio"),
            *("-kernel", str(self._image.kernel), "-initrd", str(self._image.initramfs)),
            *("-append", command_line),
            *("-netdev", "tap,id=red,ifname=tap0,script=no,downscript=no"),
            *("-device", f"virtio-net-pci,netdev=red,mac={MAC},romfile="),
        )
        with self._complaints.open("w") as log:
            return subprocess.Popen(
                _inside(self._pod, *words),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
            )

    def _comes_up(self, seconds: float) -> bool:
        """Whether it says that it is ready, once more than before."""
        process, before = self._process, self._boots
        assert process is not None

        def settled() -> bool:
            self._boots = self.said().count(READY)
            return self._boots > before or process.poll() is not None

        return eventually(settled, seconds) and self._boots > before

    def _complaint(self) -> str:
        """Why it is not up, in a line."""
        assert self._process is not None
        if self._process.poll() is None:
            return f"not up after {BOOTS_WITHIN[self._accelerator]} s of waiting"
        said = self._complaints.read_text(errors="replace").strip().splitlines()
        return f"qemu ended: {said[-1]}" if said else "qemu ended without a word"

    def _failure(self) -> str:
        complaints = self._complaints.read_text(errors="replace").splitlines()
        return "\n".join(["the guest does not come up:", *complaints[-20:], *self.said()[-20:]])

    def _tell(self, command: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()


@contextmanager
def wired() -> Iterator[tuple[str, str]]:
    """The namespaces of a client and of a pod."""
    with space() as client, space() as pod:
        for name in (client, pod):
            within(name, "sysctl", "-qw", *SETTINGS)
        ip(
            pod,
            "link set lo up",
            f"link add eth0 type veth peer name eth0 netns {client}",
            *(f"addr add {address} dev eth0" for address in ("192.0.2.2/24", "2001:db8::2/64")),
            "link set eth0 up",
            "link add k6t-eth0 type bridge mcast_snooping 0",
            *(f"addr add {address} dev k6t-eth0" for address in ("10.0.2.1/24", "fd10:0:2::1/120")),
            "link set k6t-eth0 up",
            "tuntap add tap0 mode tap",
            "link set tap0 master k6t-eth0 up",
        )
        ip(
            client,
            "link set lo up",
            *(f"addr add {address} dev eth0" for address in ("192.0.2.1/24", "2001:db8::1/64")),
            "link set eth0 up",
        )
        yield client, pod


@contextmanager
def guest(pod: str, image: Image, ports: Sequence[int]) -> Iterator[Guest]:
    """A guest that answers on these ports once it is started, and who leases it its address."""
    with TemporaryDirectory() as folder, leasing(pod, image, Path(folder)):
        made = Guest(pod, image, ports, Path(folder))
        try:
            yield made
        finally:
            made.stop()


@contextmanager
def leasing(pod: str, image: Image, folder: Path) -> Iterator[None]:
    """A DHCP server on the bridge with one address to give, as virt-launcher runs it."""
    configuration = folder / "udhcpd.conf"
    configuration.write_text(LEASES.format(folder=folder, mac=MAC))
    (folder / "leases").touch()
    words = (str(image.busybox), "udhcpd", "-f", str(configuration))
    with ExitStack() as stack:
        log = stack.enter_context((folder / "udhcpd.log").open("w"))
        server = subprocess.Popen(_inside(pod, *words), stderr=log, stdin=subprocess.DEVNULL)
        stack.callback(server.wait, PATIENCE)
        stack.callback(server.kill)
        yield


def accelerators() -> tuple[str, ...]:
    """What to try here, best first. That /dev/kvm can be opened does not say that a guest runs."""
    return (KVM, EMULATION) if os.access("/dev/kvm", os.R_OK | os.W_OK) else (EMULATION,)


def _inside(netns: str, *words: str) -> list[str]:
    enter = ("nsenter", f"--net=/run/netns/{netns}")
    return ["setpriv", "--pdeathsig", "KILL", *enter, *words]
