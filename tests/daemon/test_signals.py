"""What a service manager says to the daemon, and what it says back: start, reload, stop; and who
may not start at all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from agent.daemon import LISTEN_AGAIN
from agent.kernel.netns import inside, opened
from tests.daemon.running import PATIENCE, Node, comes_to_forward, forwarded, handles
from tests.spaces import eventually, manifest, observed, run, using, within

# -------------------------------------------------------------------------------------- to stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_to_stop_takes_a_moment_and_leaves_the_rules(
    node: Node, blue: str, number: signal.Signals
) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        before = handles(blue)
        daemon.tell(number)
        assert daemon.process.wait(PATIENCE) == 0
        assert daemon.said("stopping", rules="stay")
        assert handles(blue) == before


def test_to_stop_in_the_middle_of_work_takes_no_longer(node: Node, blue: str) -> None:
    """Thousands of files are being written and read when it is told."""
    with node.running() as daemon:
        for number in range(1500):
            node.save(f"{number}.yaml", manifest(f"{blue}-{number}", "22", f"vm-{number}"))
        daemon.stop()


def test_whoever_hangs_on_to_a_connection_does_not_keep_it_from_stopping(node: Node) -> None:
    with node.running() as daemon:
        with opened(node.home) as descriptor, inside(descriptor, node.home):
            idle = socket.create_connection(("127.0.0.1", daemon.port), PATIENCE)
        with idle:
            idle.send(b"GET /sta")
            daemon.stop()


def test_the_log_is_lines_of_names_and_values_unless_asked_otherwise(node: Node) -> None:
    words = node.words()
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stderr is not None
            lines = []
            for line in daemon.stderr:
                lines.append(line)
                if "event=ready" in line:
                    daemon.terminate()
            assert daemon.wait(PATIENCE) == 0
        finally:
            daemon.kill()
    events = [dict(word.partition("=")[::2] for word in line.split())["event"] for line in lines]
    assert events == ["listening", "started", "ready", "stopping"]


# ------------------------------------------------------------------------------------- to reload


def test_a_reload_takes_another_directory(node: Node, blue: str, red: str) -> None:
    node.save("a.yaml", manifest(blue, "22", "one"))
    node.save("b.yaml", manifest(red, "80", "two"))
    other = node.folder / "other.d"
    other.mkdir()
    (other / "a.yaml").write_text(manifest(blue, "22", "one"))
    with node.running() as daemon:
        before = handles(blue)
        node.configure(manifests=str(other))
        daemon.reload()
        assert handles(blue) == before
        assert not observed(red).table
        assert daemon.status()["source"] == str(other)
        node.remove("a.yaml")
        (other / "a.yaml").write_text(manifest(blue, "23", "one"))
        assert comes_to_forward(blue, "tcp 23")


def test_a_reload_to_a_directory_that_is_not_there_takes_nothing_away(
    node: Node, blue: str
) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        before = handles(blue)
        node.configure(manifests=str(node.folder / "nowhere"))
        daemon.reload()
        assert daemon.said("source away")
        assert handles(blue) == before


def test_a_reload_takes_another_pace_of_resyncs_at_once(node: Node, blue: str) -> None:
    node.configure(resync_seconds=3600)
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        node.configure(resync_seconds=1)
        daemon.reload()
        within(blue, "sysctl", "-qw", "net.ipv4.ip_forward=0")
        assert eventually(
            lambda: within(blue, "sysctl", "-n", "net.ipv4.ip_forward").strip() == "1", 5
        )


def test_a_reload_takes_another_address_to_listen_on(node: Node) -> None:
    with node.running() as daemon:
        before = daemon.port
        node.configure(listen="127.0.0.2:0")
        daemon.reload()
        assert [one["address"] for one in daemon.said("listening")] == ["127.0.0.1", "127.0.0.2"]
        with opened(node.home) as descriptor, inside(descriptor, node.home):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", before), PATIENCE)
            socket.create_connection(("127.0.0.2", daemon.port), PATIENCE).close()
        node.configure(listen="")
        daemon.reload()
        with (
            opened(node.home) as descriptor,
            inside(descriptor, node.home),
            pytest.raises(ConnectionRefusedError),
        ):
            socket.create_connection(("127.0.0.2", daemon.port), PATIENCE)


def test_a_reload_takes_another_backend(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        assert daemon.standing(blue)["backend"] == "nftables"
        node.configure(backend="iptables")
        daemon.reload()
        assert daemon.standing(blue)["backend"] == "iptables"
        assert "portranger" not in within(blue, "nft", "list", "ruleset")
        with using("iptables"):
            assert forwarded(blue) == {"tcp 22"}
        node.configure(backend="nftables")
        daemon.reload()
        assert daemon.standing(blue)["backend"] == "nftables"
        assert forwarded(blue) == {"tcp 22"}
        assert "PORTRANGER" not in within(blue, "iptables-legacy-save")


def test_a_reload_that_cannot_be_keeps_the_old_configuration(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    good = node.config.read_text()
    with node.running() as daemon, taken(node) as port:
        before = handles(blue)
        node.config.write_text("manifests = 5\nnonsense = true\n")
        daemon.reload()
        assert len(daemon.said("bad configuration", so="the old one goes on")) == 2
        assert eventually(lambda: daemon.metric("configuration_current") == 0)
        assert "the one from before goes on: " in daemon.status()["configuration"]
        node.config.unlink()
        daemon.reload()
        assert len(daemon.said("bad configuration")) == 3
        node.config.write_text(good)
        node.configure(listen=f"127.0.0.1:{port}")
        daemon.reload()
        (failed,) = daemon.said("reload failed")
        assert "another process listens there" in failed["why"]
        assert daemon.standing(blue)["state"] == "in sync"
        assert handles(blue) == before
        (node.folder / "empty").mkdir()
        others = {"backend": "iptables", "manifests": str(node.folder / "empty")}
        node.configure(listen=f"127.0.0.1:{port}", **others)
        daemon.reload()
        assert len(daemon.said("reload failed")) == 2
        assert daemon.standing(blue)["state"] == "in sync"
        assert handles(blue) == before
        node.configure(backend="auto", manifests=str(node.manifests))
        node.configure(state_dir=str(node.folder / "other"), listen="127.0.0.1:0")
        daemon.reload()
        assert daemon.said("restart to change it", key="state_dir")
        assert eventually(lambda: daemon.status()["configuration"] is None)
        assert eventually(lambda: daemon.metric("configuration_current") == 1)
        node.save("a.yaml", manifest(blue, "23"))
        assert comes_to_forward(blue, "tcp 23")
        assert not (node.folder / "other").exists()


def test_a_reload_reads_what_no_event_told_of(node: Node, blue: str) -> None:
    """And does so without waiting for anybody's back-off."""
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        within(blue, "sysctl", "-qw", "net.ipv4.ip_forward=0")
        daemon.reload()
        assert within(blue, "sysctl", "-n", "net.ipv4.ip_forward").strip() == "1"


# ------------------------------------------------------------------------------------ not to start


@contextmanager
def taken(node: Node) -> Iterator[int]:
    """A port of the node that somebody else listens on."""
    with opened(node.home) as descriptor, inside(descriptor, node.home):
        other = socket.create_server(("127.0.0.1", 0))
    with other:
        yield int(other.getsockname()[1])


def test_a_second_daemon_on_the_same_state_says_who_is_first(node: Node) -> None:
    with node.running() as daemon:
        code, said = node.refused()
        assert code == 75
        assert f"pid {daemon.pid} " in said
        assert str(node.state) in said
        assert daemon.alive
    with node.running():
        assert int((node.state / "lock").read_text()) != daemon.pid


def test_a_second_daemon_with_its_own_state_is_welcome(
    node: Node, blue: str, red: str, tmp_path: Path
) -> None:
    other = Node(tmp_path / "other", node.home)
    node.save("a.yaml", manifest(blue, "22", "one"))
    other.save("a.yaml", manifest(red, "80", "two"))
    with node.running(), other.running():
        assert forwarded(blue) == {"tcp 22"}
        assert forwarded(red) == {"tcp 80"}


def test_a_bad_configuration_is_told_whole(node: Node) -> None:
    node.config.write_text('manifests = "relative"\nlisten = 5\nwhat = 1\n')
    code, said = node.refused()
    assert code == 78
    assert len(said.splitlines()) == 3
    assert f"{node.config}:1: manifests:" in said


@pytest.mark.parametrize("capability", ["net_admin", "net_broadcast", "sys_admin"])
def test_who_lacks_a_capability_is_told_which(node: Node, capability: str) -> None:
    code, said = node.refused(
        "setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"
    )
    assert code == 77
    assert f"CAP_{capability.upper()}" in said


def test_who_has_no_capability_at_all_is_told_one(node: Node) -> None:
    code, said = node.refused("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    assert code == 77
    assert "CAP_" in said


def test_who_takes_its_address_does_not_keep_it_from_forwarding(node: Node, blue: str) -> None:
    """Anybody may listen on the loopback. It listens when they have gone."""
    node.save("a.yaml", manifest(blue, "22"))
    with ExitStack() as others:
        port = others.enter_context(taken(node))
        node.configure(listen=f"127.0.0.1:{port}")
        with node.running() as daemon:
            assert comes_to_forward(blue, "tcp 22")
            (told,) = daemon.said("not listening", so="all else goes on")
            assert f"127.0.0.1:{port}: another process listens there" in told["why"]
            node.save("a.yaml", manifest(blue, "23"))
            assert comes_to_forward(blue, "tcp 23")
            others.close()
            assert eventually(lambda: bool(daemon.said("listening")), 2 * LISTEN_AGAIN)
            assert daemon.standing(blue)["state"] == "in sync"


def test_a_reload_that_comes_while_it_starts_is_done_when_it_has_started(node: Node) -> None:
    daemon = node.start()
    try:
        assert eventually(lambda: holds_back(daemon.pid, signal.SIGHUP), PATIENCE)
        daemon.tell(signal.SIGHUP)
        assert daemon.says("reloaded")
        daemon.stop()
    finally:
        daemon.kill()


def holds_back(pid: int, number: signal.Signals) -> bool:
    """Whether a signal would have to wait now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("SigBlk:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


# ------------------------------------------------------------------------------------- sd_notify


class Manager:
    """Hears what systemd would hear."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(address)
        self.heard: list[dict[str, str]] = []

    def _hear(self) -> list[dict[str, str]]:
        for _ in range(10_000):
            try:
                lines = self._socket.recv(8192).decode().splitlines()
            except BlockingIOError:
                break
            self.heard.append(dict(line.partition("=")[::2] for line in lines))
        return self.heard

    def hears(self, key: str, times: int = 1) -> bool:
        return eventually(lambda: sum(key in one for one in self._hear()) >= times)

    def order(self, *keys: str) -> list[str]:
        """In which order it heard these."""
        return [key for one in self._hear() for key in one if key in keys]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager() -> Iterator[Manager]:
    with tempfile.TemporaryDirectory() as folder:  # whose path is short: there is room for 107
        made = Manager(f"{folder}/notify")
        yield made
        made.close()


def test_the_manager_is_told_of_every_step(node: Node, blue: str, manager: Manager) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running(environment={"NOTIFY_SOCKET": manager.address}) as daemon:
        assert manager.hears("READY")
        (ready,) = [one for one in manager.heard if "READY" in one]
        assert ready["STATUS"] == "Namespaces: 1 in sync"
        node.save("b.yaml", "[")
        assert eventually(
            lambda: (
                manager.hears("STATUS")
                and manager.heard[-1].get("STATUS")
                == "Namespaces: 1 in sync, 1 problem in manifests"
            )
        )
        daemon.reload()
        assert manager.hears("READY", times=2)
        (reloading,) = [one for one in manager.heard if "RELOADING" in one]
        assert int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        daemon.stop()
    steps = manager.order("READY", "RELOADING", "STOPPING")
    assert steps == ["READY", "RELOADING", "READY", "STOPPING"]
    assert not manager.order("WATCHDOG")


def test_the_watchdog_is_fed_and_starves_with_the_loop(
    node: Node, blue: str, manager: Manager
) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "300000"}
    node.save("a.yaml", manifest(blue, "22"))
    with node.running(environment=environment) as daemon:
        start, cpu = len(manager.order("WATCHDOG")), daemon.cpu_seconds()
        time.sleep(1.2)
        fed = len(manager.order("WATCHDOG")) - start
        assert 4 <= fed <= 20
        assert daemon.cpu_seconds() - cpu < 0.2
        daemon.tell(signal.SIGSTOP)
        assert eventually(lambda: is_stopped(daemon.pid))
        start = len(manager.order("WATCHDOG"))
        time.sleep(0.3)
        assert len(manager.order("WATCHDOG")) == start
        daemon.tell(signal.SIGCONT)
        assert manager.hears("WATCHDOG", times=start + 1)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_watchdog_that_is_for_another_process_is_left_alone(node: Node, manager: Manager) -> None:
    environment = {
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "100000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    with node.running(environment=environment) as daemon:
        assert manager.hears("READY")
        assert daemon.get("/healthz")[0] == 200
        daemon.stop()
    assert not manager.order("WATCHDOG")


def test_status_reports_a_stopped_daemon_as_not_responding(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        node.configure(listen=f"127.0.0.1:{daemon.port}")
        words = [*node.words()[:-3], "status", "-c", str(node.config)]
        daemon.tell(signal.SIGSTOP)
        try:
            assert eventually(lambda: is_stopped(daemon.pid))
            asked = run(*words, code=75)
        finally:
            daemon.tell(signal.SIGCONT)
        who = f"the daemon (pid {daemon.pid}) is running but not responding"
        assert asked.stderr.startswith(f"portranger: {who}; see journalctl -u portranger")
        node.configure(listen="127.0.0.1:1")
        elsewhere = run(*words, code=75).stderr
        assert f"(pid {daemon.pid}) is running but not listening at 127.0.0.1:1" in elsewhere


def test_ready_in_the_log_is_what_readyz_answers(node: Node, blue: str) -> None:
    away = node.folder / "away"
    node.save("a.yaml", manifest(blue, "22"))
    node.manifests.rename(away)
    with node.running() as daemon:
        assert daemon.get("/readyz")[0] == 503
        (unready,) = daemon.said("not ready", after="start")
        assert "cannot be read: No such file or directory" in unready["why"]
        assert not daemon.said("ready")
        away.rename(node.manifests)
        assert daemon.says("ready", after="change")
        assert eventually(lambda: daemon.get("/readyz")[0] == 200)
        daemon.reload()
        assert daemon.said("ready", after="reload")


def test_the_status_command_asks_the_daemon(node: Node, blue: str) -> None:
    node.save("a.yaml", manifest(blue, "22"))
    with node.running() as daemon:
        node.configure(listen=f"127.0.0.1:{daemon.port}")
        words = [*node.words()[:-3], "status", "-c", str(node.config)]
        assert f"namespace {blue}: in sync" in run(*words).stdout
        answer = json.loads(run(*words, "-o", "json").stdout)
        assert answer["pid"] == daemon.pid
